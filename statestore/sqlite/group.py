"""Group commit: calls that wait at the same moment share one transaction, and so one fsync.

Each call of a group runs in a savepoint of its own: one that fails is undone alone. A failure of the store itself fails
them all, with nothing of any of them done.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import apsw

from forkpoint.errors import ForkpointError
from forkpoint.statestore.sqlite.connection import SqliteConnection

T = TypeVar("T")

GROUP_MAX: Final = 64
"""Calls in one transaction: enough to make fsync cheap, few enough that the first does not wait long for the last."""
_CALL_ERRORS: Final = (ForkpointError, apsw.ConstraintError, ArithmeticError, LookupError, TypeError, ValueError)
"""What a call may raise by its own fault."""


@dataclass(eq=False, slots=True)
class _Call:
    work: Callable[[apsw.Connection], Any]
    future: "Future[Any]" = field(default_factory=Future)
    result: Any = None
    error: BaseException | None = None

    def settle(self) -> None:
        """Give the caller its outcome."""
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class GroupCommit:
    """Runs the writing calls of one connection, in the order in which they came."""

    def __init__(self, connection: SqliteConnection) -> None:
        self._connection = connection
        self._waiting: deque[_Call] = deque()

    async def run(self, work: Callable[[apsw.Connection], T]) -> T:
        """Run `work` in a transaction and return its result once that is durable. Cancelling does not undo it: the
        call happens wholly, or (it had not begun) not at all."""
        call = _Call(work)
        self._waiting.append(call)
        self._connection.submit(self._commit_waiting)
        result: T = await asyncio.wrap_future(call.future)
        return result

    def _commit_waiting(self) -> None:
        """In the worker: commit whatever waits now; nothing, when an earlier run took it along."""
        group: list[_Call] = []
        while self._waiting and len(group) < GROUP_MAX:
            call = self._waiting.popleft()
            if call.future.set_running_or_notify_cancel():
                group.append(call)
        if not group:
            return
        try:
            with self._connection.transaction("BEGIN IMMEDIATE") as db:
                for call in group:
                    self._attempt(db, call, alone=len(group) == 1)
        except BaseException as error:  # noqa: BLE001 - whatever it is, every caller must hear of it
            for call in group:
                call.error = call.error or error
        for call in group:
            call.settle()
        self._connection.move_wal_when_long()

    def _attempt(self, db: apsw.Connection, call: _Call, alone: bool) -> None:
        """Run one call; alone it may fail its whole transaction, in company it is undone by itself."""
        if alone:
            call.result = call.work(db)
            return
        db.execute("SAVEPOINT one_call")
        try:
            call.result = call.work(db)
        except _CALL_ERRORS as error:
            call.error = error
            self._connection.undone += 1
            db.execute("ROLLBACK TO one_call")
        db.execute("RELEASE one_call")
