"""What every query function gets: the connection inside a transaction, the time, and the root of all chains."""

from dataclasses import dataclass
from typing import Any

import apsw


@dataclass(frozen=True, slots=True)
class Tx:
    """One running transaction."""

    db: apsw.Connection
    now_us: int
    root: bytes
    """h(0)."""

    def run(self, sql: str, *values: Any) -> int:
        """Run a statement; returns the number of rows it changed."""
        self.db.execute(sql, values)
        return self.db.changes()

    def one(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        """The first row, or None."""
        for row in self.db.execute(sql, values):
            return tuple(row)
        return None

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """All rows."""
        return [tuple(row) for row in self.db.execute(sql, values)]
