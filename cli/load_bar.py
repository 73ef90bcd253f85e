"""LoadBar: a bar on the terminal while a model loads."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class LoadBar:
    """Called with bytes read and bytes to read. The bar comes with the first call and goes with the last one, or when
    the block ends."""

    def __init__(self, console: Console | None = None) -> None:
        self._bar = Progress(
            TextColumn("loading the model"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("load", total=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if done == total:
            self._bar.stop()
            return
        self._bar.start()
        self._bar.update(self._task, completed=done, total=total)
