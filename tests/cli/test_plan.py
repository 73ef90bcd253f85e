"""`forkpoint plan` prints the published memory arithmetic, to the byte."""

import json
from pathlib import Path
from typing import Any

import pytest

from forkpoint.cli.main import main

TINY = Path(__file__).resolve().parents[2] / "model" / "tiny"


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


@pytest.mark.parametrize(("dtype", "state"), [("bf16", 217_055_232), ("fp32", 434_110_464)])
def test_the_state_of_k3_has_its_published_size(capsys: pytest.CaptureFixture[str], dtype: str, state: int) -> None:
    figures = plan(capsys, "--model", "k3", "--tokens", "128000", "--kda-dtype", dtype)
    assert figures["slot.state"] == state == 69 * 96 * 128 * 128 * (2 if dtype == "bf16" else 4)
    assert figures["latent_bytes_per_token"] == 27_648
    assert figures["slot.conv_grid"] == 69 * 3 * 36_864 * 2


@pytest.mark.parametrize(
    ("tokens", "all_mla", "hybrid", "saving"),
    [(128_000, 13.71, 3.76, 0.726), (1_000_000, 107.14, 27.87, 0.740)],
)
def test_the_hybrid_saves_what_was_published(
    capsys: pytest.CaptureFixture[str], tokens: int, all_mla: float, hybrid: float, saving: float
) -> None:
    figures = plan(capsys, "--model", "k3", "--tokens", str(tokens), "--kda-dtype", "bf16")
    assert round(figures["all_mla"] / 1e9, 2) == all_mla
    assert round(figures["hybrid"] / 1e9, 2) == hybrid
    assert round(figures["hybrid_saving"], 3) == saving


def test_fifty_checkpoints_of_a_million_tokens_take_what_was_published(capsys: pytest.CaptureFixture[str]) -> None:
    figures = plan(capsys, "--model", "k3", "--tokens", "1000000", "--kda-dtype", "bf16", "--checkpoint-every", "20000")
    assert figures["checkpoints"] == 50
    assert figures["all_checkpoints.state"] == 50 * 217_055_232
    assert round(figures["live_with_checkpoint_states"] / 1e9, 2) == 38.72


def test_kimi_linear_and_a_folder_have_plans_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, "--model", "kimi-linear", "--tokens", "64")["slot.state"] == 20 * 32 * 128 * 128 * 4
    figures = plan(capsys, "--model", str(TINY), "--tokens", "4096", "--sessions", "3")
    assert (figures["kda_layers"], figures["mla_layers"], figures["sessions"]) == (6, 2, 3)
    assert figures["device_total"] == 3 * figures["device_session"]


def test_the_table_shows_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "k3", "--tokens", "128000"]) == 0
    out = capsys.readouterr().out
    assert "434,110,464" in out and "434.11 MB" in out


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--model", "gpt", "--tokens", "1"], "--model"),
        (["--model", "k3", "--tokens", "-1"], "tokens"),
        (["--model", "k3", "--tokens", "64", "--checkpoint-every", "100"], "checkpoint_every"),
        (["--model", "k3", "--tokens", "64", "--sessions", "0"], "sessions"),
    ],
)
def test_a_plan_of_nonsense_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], names: str
) -> None:
    assert main(["plan", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: CONFIG: ") and names in captured.err and captured.err.count("\n") == 1


def test_wrong_usage_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--tokens", "1"])
    assert stop.value.code == 2
    assert "--model" in capsys.readouterr().err
