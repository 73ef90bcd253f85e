"""Looks at every effect in the store: whether the one who wrote was allowed to, whatever the store itself thinks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from forkpoint.errors import NotFoundError
from forkpoint.ids import SessionName
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.records import SessionRow
from tests.sim.instant import at_once

OWNERS_ONLY: Final = frozenset(
    {
        *("append", "begin_generation", "commit_step", "rewind", "put_checkpoint", "note_numerics", "release"),
        *("begin_migration", "end_migration"),
    }
)
"""Calls that only the owner may make, under its epoch."""


@dataclass(frozen=True)
class Call:
    """A call on one of the store's ports. `caller`: the incarnation."""

    port: str
    method: str
    args: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    caller: str = ""


class Violation(AssertionError):
    """A promise was broken."""


class Watch:
    """Epochs never go back, and a session is changed by its owner alone."""

    def __init__(self) -> None:
        self._epochs: dict[SessionName, int] = {}
        self._trusts_owners = True
        self.found: list[str] = []

    def forget(self) -> None:
        """Acknowledged writes were lost, epochs among them: two nodes may own one session under one epoch now."""
        self._epochs.clear()
        self._trusts_owners = False

    def rolled_back(self, catalog: MemoryCatalog) -> None:
        """A failover took back what nobody had been told of: an owner that lives may go on under the epoch that it had,
        as if it had never handed its session over."""
        rows = {name: _row(catalog, name) for name in self._epochs}
        self._epochs = {name: row.epoch for name, row in rows.items() if row is not None}

    def take_back(self, catalog: MemoryCatalog) -> None:
        """Writes that nobody was told of are gone: epochs are those of what is left."""
        self._epochs = {name: row.epoch for name in self._epochs if (row := _row(catalog, name)) is not None}

    def before(self, call: Call, catalog: MemoryCatalog) -> dict[SessionName, SessionRow]:
        """Rows of the sessions that the call may change."""
        names = _names(call) if call.port == "catalog" else []
        return {name: row for name in names if (row := _row(catalog, name)) is not None}

    def after(self, call: Call, before: dict[SessionName, SessionRow] | None, catalog: MemoryCatalog) -> None:
        """Compare with what is there now."""
        for name, old in (before or {}).items():
            new = _row(catalog, name)
            if new is None:
                self.found.append(f"{name} vanished in {call.method} of {call.caller}")
                continue
            if new.epoch < max(old.epoch, self._epochs.get(name, 0)):
                self.found.append(f"{name}: epoch {old.epoch} went back to {new.epoch} in {call.method}")
            self._epochs[name] = new.epoch
            if new.head < old.head and call.method != "rewind":
                self.found.append(f"{name}: the log shrank from {old.head} to {new.head} in {call.method}")
            self._check_owner(call, old, new)

    def _check_owner(self, call: Call, old: SessionRow, new: SessionRow) -> None:
        if not self._trusts_owners:
            return
        if call.method == "cut_over" and old.owner != new.owner:
            word = (old.migration_target, new.owner, new.head, new.head_hash, new.branch)
            if word != (call.caller, call.caller, old.head, old.head_hash, old.branch):
                self.found.append(f"{old.name}: {call.caller} cut over what was to go to {old.migration_target!r}")
            return
        if call.method not in OWNERS_ONLY:
            return
        changed = (old.head, old.branch, old.state, old.owner, old.migration) != (
            *(new.head, new.branch, new.state, new.owner, new.migration),
        )
        if changed and old.owner != call.caller:
            self.found.append(
                f"{old.name}: {call.method} of {call.caller} took effect, its owner is {old.owner or 'nobody'} "
                f"at epoch {old.epoch}"
            )


def _names(call: Call) -> list[SessionName]:
    """Sessions in a call's arguments."""
    found: list[SessionName] = []
    for value in (*call.args, *call.keywords.values()):
        if isinstance(value, SessionName):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item.session for item in value if hasattr(item, "session")]
        elif isinstance(session := getattr(value, "session", None), SessionName):
            found.append(session)
    return found


def _row(catalog: MemoryCatalog, name: SessionName) -> SessionRow | None:
    try:
        return at_once(catalog.get_session(name))
    except NotFoundError:
        return None
