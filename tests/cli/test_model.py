"""`forkpoint model`: a folder of a published geometry is made, and a model is looked into without its weights."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from forkpoint.cli.main import main
from forkpoint.cli.model_report import parse_bytes
from forkpoint.errors import ConfigError

SMALL = ("--layers", "5", "--hidden", "64", "--heads", "2", "--ffn", "32", "--experts", "9", "--vocab", "280")


def made(folder: Path, *arguments: str, geometry: str = "k3") -> Path:
    assert main(["model", "make", str(folder), "--geometry", geometry, *SMALL, *arguments]) == 0
    return folder


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["model", "inspect", *arguments, "--json"]) == status
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["model", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_what_was_made_is_told_and_found_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "model", "--seed", "7")
    assert "layers 1 to 5, of which 4 are MLA" in capsys.readouterr().out
    document = inspected(capsys, str(folder), "--tokens", "640", "--sessions", "3")
    assert document["problems"] == []
    assert document["plan"]["device_total"] == 3 * document["plan"]["device_session"]
    shown = main(["model", "inspect", str(folder)])
    out = capsys.readouterr().out
    assert shown == 0 and "MXFP4" in out and "4 KDA, 1 MLA: 4" in out and "problem" not in out


def test_the_facts_of_what_was_made_are_machine_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, "--json", "--dtype", "fp32", geometry="kimi-linear")
    facts = json.loads(capsys.readouterr().out)
    assert (facts["layers"], facts["mla_layers"], facts["experts"], facts["vocab"]) == (5, [4], 9, 280)
    assert (
        facts["bytes"] == json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    )
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--layers", "2"), "layers"),
        (("--ffn", "33"), "ffn"),
        (("--vocab", "100"), "vocab"),
    ],
)
def test_a_size_that_does_not_go_is_one_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], names: str
) -> None:
    error = refusal(capsys, "make", str(tmp_path / "model"), "--geometry", "k3", *SMALL, *arguments)
    assert error.startswith(f"error: CONFIG: {names} (from geometry k3): ")
    assert not (tmp_path / "model").exists()


def test_a_folder_with_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").touch()
    assert "DIR (from command line)" in refusal(capsys, "make", str(tmp_path), "--geometry", "k3", *SMALL)


def test_memory_that_is_too_small_is_told_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    weights = inspected(capsys, "kimi-linear")["weights"]["device_bytes"]
    one = inspected(capsys, "kimi-linear", "--tokens", "64")["plan"]["device_session"]
    asked = ("kimi-linear", "--tokens", "64", "--sessions", "5", "--device-memory")
    fit = inspected(capsys, *asked, str(weights + 4 * one), status=1)["fit"]
    assert (fit["short_by"], fit["weights_short_by"], fit["sessions_that_fit"]) == (one, 0, 4)
    assert inspected(capsys, *asked, str(weights + 5 * one))["fit"]["short_by"] == 0
    assert main(["model", "inspect", *asked, "80GiB"]) == 1
    assert "The weights do not fit 85.90 GB of device memory: 12.35 GB are missing" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "count"), [("1024", 1024), ("80GiB", 80 << 30), ("1.5 tb", 1_500_000_000_000)])
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text, "--device-memory") == count


@pytest.mark.parametrize("text", ["", "much", "-5GB", "0", "5 boxes", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text, "--device-memory")
    assert caught.value.key == "--device-memory"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("gpt",), "MODEL (from command line)"),
        (("k3", "--tokens", "-1"), "tokens"),
        (("k3", "--sessions", "0"), "sessions"),
        (("k3", "--device-memory", "big"), "--device-memory"),
    ],
)
def test_a_question_that_makes_no_sense_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], names: str
) -> None:
    assert f"error: CONFIG: {names}" in refusal(capsys, "inspect", *arguments)


@pytest.mark.parametrize("name", ["kimi-linear", "k3"])
def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str], name: str) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    shown = rf"<!-- inspect: ({name} [^\n]*) -->\n```\n(.*?)```\n<!-- end -->"
    arguments, block = re.findall(shown, page, re.DOTALL)[0]
    assert main(["model", "inspect", *arguments.split()]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
    assert block.splitlines() == printed


def test_a_published_geometry_is_looked_into_without_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from forkpoint.cli.main import main; sys.exit(main(['model', 'inspect', 'kimi-linear']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, check=False
    )
    assert result.returncode == 0 and b"49.12 B" in result.stdout, result.stderr


def damage(folder: Path, name: str, change: dict[str, Any]) -> None:
    """Changes fields of a JSON file; those of a text_config, where there is one."""
    content = json.loads((folder / name).read_text())
    content.get("text_config", content).update(change)
    (folder / name).write_text(json.dumps(content))


def test_every_problem_of_a_folder_is_in_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "model")
    damage(folder, "config.json", {"hidden_act": "gelu", "num_hidden_layers": 4})
    damage(folder, "config.json", {"linear_attn_config": linear_of(folder, 4)})
    damage(folder, "tokenizer_config.json", {"tokenizer_class": "OtherTokenizer"})
    problems = inspected(capsys, str(folder), status=1)["problems"]
    assert [problem for problem in problems if problem.startswith("text_config.hidden_act: the activation 'gelu'")]
    assert "model.layers.4.self_attn.A_log is unexpected" in problems
    assert [problem for problem in problems if problem.startswith("tokenizer_class (from ")]
    assert main(["model", "inspect", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert sum(line.startswith("problem: ") for line in shown.splitlines()) == len(problems)


def linear_of(folder: Path, layers: int) -> dict[str, Any]:
    """The folder's linear_attn_config, cut to the first layers."""
    linear: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]["linear_attn_config"]
    return {
        key: [n for n in value if n <= layers] if key.endswith("layers") else value for key, value in linear.items()
    }


def test_a_folder_is_looked_into_without_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "model", geometry="kimi-linear")
    (shard,) = folder.glob("*.safetensors")
    with shard.open("r+b") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        size = shard.stat().st_size
        file.truncate(begin)
        # A hole of the same length: no byte of a weight is left.
        file.truncate(size)
    assert inspected(capsys, str(folder))["problems"] == []
    shard.unlink()
    assert [shard.name in problem for problem in inspected(capsys, str(folder), status=1)["problems"]].count(True) == 1


def test_vision_tensors_are_a_note_and_no_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "model")
    save_file({"vision_tower.patch_embed.proj.weight": torch.zeros(4, 3)}, folder / "vision.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["vision_tower.patch_embed.proj.weight"] = "vision.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    document = inspected(capsys, str(folder))
    assert document["problems"] == [] and document["notes"] == ["1 vision tensors are skipped, this version reads text"]
