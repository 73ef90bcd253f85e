"""The bar of `forkpoint serve` while a model loads."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from forkpoint.cli.load_bar import LoadBar
from forkpoint.cli.main import main
from forkpoint.config import ServerConfig
from forkpoint.server import main as server


def bar_on(terminal: io.StringIO) -> LoadBar:
    return LoadBar(Console(file=terminal, force_terminal=True, width=100))


def test_it_shows_how_much_is_read_and_goes_when_all_is() -> None:
    terminal = io.StringIO()
    with bar_on(terminal) as bar:
        bar(500, 2000)
        bar(1000, 2000)
        bar(2000, 2000)
        shown = terminal.getvalue()
    assert "loading the model" in shown
    assert "1.0/2.0 kB" in shown
    assert shown.endswith("\x1b[2K")
    assert terminal.getvalue() == shown


def test_a_loading_that_fails_takes_it_away() -> None:
    terminal = io.StringIO()
    with pytest.raises(OSError, match="gone"), bar_on(terminal) as bar:
        bar(500, 2000)
        raise OSError("gone")
    assert terminal.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize("terminal", [True, False])
def test_it_is_for_terminals_and_others_have_the_log(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Callable[[int, int], None] | None] = []

    def serve(config: ServerConfig, progress: Callable[[int, int], None] | None = None) -> int:
        given.append(progress)
        return 0

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert main(["serve", "--data", str(tmp_path)]) == 0
    assert [isinstance(progress, LoadBar) for progress in given] == [terminal]
