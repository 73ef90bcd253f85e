"""The flags of `forkpoint serve`."""

import argparse
import re
from dataclasses import fields
from pathlib import Path

import pytest

from forkpoint.cli import serve
from forkpoint.cli.main import build_parser, main
from forkpoint.config import ServerConfig
from forkpoint.errors import ConfigError


def settings(*flags: str) -> ServerConfig:
    arguments: argparse.Namespace = build_parser().parse_args(["serve", *flags])
    return serve.settings(arguments)


def test_every_setting_has_a_flag_with_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    for field in fields(ServerConfig):
        assert re.search(rf"--{field.name.replace('_', '-')}\b", shown), field.name
        assert serve.HELP[field.name]


def test_flags_win_over_the_environment_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "forkpoint.toml"
    file.write_text('[server]\nslots = 3\npages = 70\nnode = "from-file"\n')
    monkeypatch.setenv("FORKPOINT_PAGES", "80")
    monkeypatch.setenv("FORKPOINT_NODE", "from-environment")
    config = settings("--config", str(file), "--node", "from-flag", "--checkpoint-on-turn-end")
    assert (config.slots, config.pages, config.node, config.checkpoint_on_turn_end) == (3, 80, "from-flag", True)


def test_an_address_is_host_and_port_in_one() -> None:
    config = settings("--address", "127.0.0.1:7000")
    assert (config.host, config.port) == ("127.0.0.1", 7000)


def test_the_default_is_loopback() -> None:
    assert settings().host == "127.0.0.1"


def test_a_wrong_setting_names_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--checkpoint-every"):
        settings("--checkpoint-every", "100")
    assert main(["serve", "--slots", "none"]) == 1
    assert capsys.readouterr().err.startswith("error: CONFIG: slots (from flag --slots)")
