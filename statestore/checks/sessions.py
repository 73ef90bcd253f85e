"""Live sessions: their logs, generations, owners and parents."""

from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Final

from forkpoint.errors import LogCorruptError, NotFoundError
from forkpoint.limits import TILE_TOKENS
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.chain import HashChain, root_hash
from forkpoint.statestore.findings import Finding, Severity
from forkpoint.statestore.records import SessionRow, SessionState
from forkpoint.statestore.scan import all_sessions

READ_TOKENS: Final = 65_536


class SessionCheck:
    """Walks all sessions; afterwards its fields say what it saw."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._nodes: frozenset[str] = frozenset()
        self.points: dict[int, set[bytes]] = defaultdict(set)
        """Grid position -> chain hashes of all logs there."""
        self.deleted = False
        """Whether there are deleted sessions, whose logs can't be read."""
        self.workflows: dict[str, None] = {}
        """Of sessions, deleted ones too."""

    async def findings(self) -> AsyncIterator[Finding]:
        """All that is wrong with sessions."""
        self._nodes = frozenset(node.incarnation for node in await self._catalog.list_nodes())
        async for row in all_sessions(self._catalog):
            self.workflows[row.name.workflow] = None
            if row.state is SessionState.DELETED:
                self.deleted = True
                continue
            try:
                for finding in await self._check(row):
                    yield finding
            except (NotFoundError, LookupError, TypeError, ValueError) as broken:
                detail = f"a row can't be read: {type(broken).__name__}: {broken}"
                yield Finding(Severity.ERROR, "DAMAGED_ROW", str(row.name), detail)

    async def _check(self, row: SessionRow) -> list[Finding]:
        """One session. Adds its grid points."""
        name, found = str(row.name), [*self._check_owner(row), *self._check_migration(row)]

        def error(kind: str, detail: str) -> None:
            found.append(Finding(Severity.ERROR, kind, name, detail))

        if row.parent is not None:
            try:
                await self._catalog.get_session(row.parent)
            except NotFoundError:
                error("WRONG_PARENT", f"its parent {row.parent} does not exist")
        if not 0 <= row.fork_position <= row.head:
            error("WRONG_PARENT", f"it was forked at {row.fork_position}, its head is {row.head}")
        try:
            chain = await self._walk(row)
            if chain.position != row.head or chain.head_hash() != row.head_hash:
                error("BAD_CHAIN", f"the log leads to {chain.position}, not to the head hash at {row.head}")
        except LogCorruptError as damage:
            error("DAMAGED_LOG", str(damage))
        generation = await self._catalog.open_generation(row.name)
        if generation is not None and not 0 < generation.start <= row.head:
            error("GENERATION_BEYOND_HEAD", f"generation {generation.generation} starts at {generation.start}")
        for ended in await self._catalog.list_generations(row.name):
            if ended.finish is not None and (ended.end is None or not ended.start <= ended.end <= row.head):
                error("GENERATION_RANGE", f"generation {ended.generation} spans {ended.start} to {ended.end}")
        return found

    def _check_owner(self, row: SessionRow) -> list[Finding]:
        """An owner is a registered incarnation, and took an epoch; a session that is put away has none."""
        name, found = str(row.name), list[Finding]()
        if row.epoch < 0 or (row.owner and row.epoch < 1):
            found.append(
                Finding(Severity.ERROR, "WRONG_EPOCH", name, f"{row.owner or 'nobody'} owns epoch {row.epoch}")
            )
        if row.owner and row.state in (SessionState.PAUSED, SessionState.QUARANTINED):
            detail = f"it is {row.state.value} and {row.owner} owns it"
            found.append(Finding(Severity.ERROR, "WRONG_OWNER", name, detail))
        elif row.owner and row.owner not in self._nodes:
            detail = f"its owner {row.owner} is no registered node: whoever is asked for it next takes it"
            found.append(Finding(Severity.WARNING, "OWNER_GONE", name, detail))
        return found

    def _check_migration(self, row: SessionRow) -> list[Finding]:
        """A migration has an owner who gave its word, and goes to a registered incarnation."""
        if not row.migration or (row.owner and row.migration_target in self._nodes):
            return []
        why = f"{row.migration_target or 'nobody'} is no registered node" if row.owner else "nobody owns the session"
        detail = f"migration {row.migration} does not end by itself: {why}"
        subject = (row.name.workflow, row.name.session, row.migration)
        return [Finding(Severity.WARNING, "MIGRATION_LEFT", str(row.name), detail, subject)]

    async def _walk(self, row: SessionRow) -> HashChain:
        """Read the whole log, add its grid points, return the chain at its end."""
        chain = HashChain(0, root_hash(self._catalog.marker))
        self.points[0].add(chain.grid_hash)
        while chain.position < row.head:
            part = await self._catalog.read_log(row.name, chain.position, READ_TOKENS)
            if not part.token_ids:
                raise LogCorruptError(str(row.name), chain.position, chain.position, "nothing more can be read")
            offset = 0
            while offset < len(part.token_ids):
                step = TILE_TOKENS - chain.position % TILE_TOKENS
                chain.extend(part.token_ids[offset : offset + step])
                offset += step
                if chain.tail == b"":
                    self.points[chain.position].add(chain.grid_hash)
        return chain
