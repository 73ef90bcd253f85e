"""`forkpoint chat` on a terminal."""

import asyncio
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from forkpoint.cli import chat
from tests.cli.conftest import Cli


class Terminal:
    """A chat in a process whose stdin, stdout and stderr are a terminal."""

    def __init__(self, cli: Cli, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forkpoint.cli.main", "chat", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | {"FORKPOINT_ADDRESS": cli.address},
            start_new_session=True,
        )
        os.close(slave)
        self.shown = ""

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        """Read until `text` appears; what was read up to it is forgotten."""
        while text not in self.shown:
            ready, _, _ = select.select([self.master], [], [], timeout_s)
            assert ready, f"{text!r} did not come; shown: {self.shown!r}"
            self.shown += os.read(self.master, 4096).decode(errors="replace")
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        os.close(self.master)


@pytest.fixture
def terminal(cli: Cli) -> Iterator[Terminal]:
    started = Terminal(cli, "talk/terminal", "--max-tokens", "0", "--temperature", "1.5", "--seed", "1")
    yield started
    started.close()


def test_a_chat_on_a_terminal_takes_turns_and_ends_with_an_empty_line(cli: Cli) -> None:
    started = Terminal(cli, "talk/turns", "--max-tokens", "16")
    try:
        started.wait_for("> ")
        started.type("memo kola = abc123\n")
        started.wait_for("ok")
        started.wait_for("> ")
        started.type("recall kola\n")
        started.wait_for("abc123")
        started.wait_for("> ")
        started.type("\n")
        assert started.process.wait(30) == 0
    finally:
        started.close()


def test_ctrl_c_ends_the_models_turn_and_at_the_prompt_the_chat(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("continue\n")
    terminal.wait_for("continue\r\n")
    while len(terminal.shown) < 20:
        terminal.shown += os.read(terminal.master, 64).decode(errors="replace")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("[cancelled at ")
    terminal.wait_for("> ")
    terminal.type("/tokens\n")
    terminal.wait_for(" tokens")
    terminal.wait_for("> ")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(30) == 130


async def test_a_signal_wakes_the_chat_whenever_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wakeup descriptor, one that comes just before the loop waits is seen with the next key only."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin, os.fdopen(writing, "w") as keys:
        monkeypatch.setattr(sys, "stdin", stdin)
        lines = chat._terminal_lines()

        async def wakeup_then_line() -> int:
            await asyncio.sleep(0.05)
            wakeup = signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(wakeup)
            keys.write("hello\n")
            keys.flush()
            return wakeup

        async with asyncio.TaskGroup() as group:
            wakeup = group.create_task(wakeup_then_line())
            assert await anext(lines) == "hello"
        assert wakeup.result() != -1
        await lines.aclose()


def test_a_model_that_does_not_think_refuses_to_be_asked_for_it(cli: Cli) -> None:
    assert "no thinking" in cli.error("chat", "talk/think", "--thinking", "hidden", stdin=b"x\n")
    assert cli.text("chat", "talk/think", "--thinking", "off", "--max-tokens", "2", stdin=b"x\n")
