"""What the verbs print: tables for people, JSON for programs, and one line for an error."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")


def fail(reason: str, message: str, status: int = 1) -> int:
    """Print `error: REASON: message` on one line of stderr; returns `status`."""
    print(f"error: {reason}: {' '.join(message.split())}", file=sys.stderr)
    return status


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_json_line(value: object) -> None:
    """One JSON object on a line of its own, at once: for streams."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def console() -> Console:
    """Where tables go. A pipe has no width, so nothing is cut there."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None) -> None:
    """A table; numbers are right-aligned and get thousands separators."""
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    console().print(table)


def print_fields(fields: Mapping[str, object]) -> None:
    """One `name  value` line a field, names aligned."""
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        print(f"{name:<{width}}  {_cell(value)}")


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return str(value)


def bytes_text(count: int) -> str:
    """Bytes in decimal units, as disks and links are sold: 434110464 -> '434.11 MB'."""
    value, unit = float(count), 0
    while abs(value) >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.2f} {_UNITS[unit]}"
