"""Sessions as callers see them."""

from forkpoint.ids import SessionName
from forkpoint.limits import PAGE_SIZE_MAX
from forkpoint.server.session.api import SessionView, Usage
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.live import Place
from forkpoint.server.session.usage import UsageCounter
from forkpoint.statestore.records import NodeRow, SessionRow, SessionState


class Views:
    """Adds the live facts of the owner to a row."""

    def __init__(self, core: NodeCore, usage: UsageCounter) -> None:
        self._core = core
        self._usage = usage

    async def one(self, row: SessionRow) -> SessionView:
        """One session's view."""
        return (await self.many([row]))[0]

    async def many(self, rows: list[SessionRow]) -> list[SessionView]:
        """Views of several sessions."""
        nodes: dict[str, NodeRow] = {}
        if any(row.owner not in ("", self._core.incarnation) for row in rows):
            nodes = {node.incarnation: node for node in await self._core.catalog.list_nodes()}
        return [await self._view(row, nodes) for row in rows]

    async def workflow(self, workflow: str) -> Usage:
        """What a workflow's sessions added to their logs: tokens that forks share count once."""
        prompt = generated = 0
        after: SessionName | None = None
        while True:
            rows = await self._core.catalog.list_sessions(workflow, after, PAGE_SIZE_MAX)
            for row in rows:
                own = await self._usage.between(row.name, min(row.fork_position, row.head), row.head)
                prompt += own.prompt_tokens
                generated += own.generated_tokens
            if len(rows) < PAGE_SIZE_MAX:
                return Usage(prompt, generated)
            after = rows[-1].name

    async def _view(self, row: SessionRow, nodes: dict[str, NodeRow]) -> SessionView:
        live = self._core.lives.get(row.name)
        node, state, consumed = "", row.state.value, 0
        if row.owner == self._core.incarnation:
            node = self._core.options.node
        elif row.owner in nodes:
            node = nodes[row.owner].node
        if live is not None and row.state is SessionState.ACTIVE:
            # The row was read a moment ago: the live session may have gone on since.
            consumed = min(live.consumed, row.head) if live.place is Place.RESIDENT else 0
            if live.place is Place.RESTORING:
                state = "RESTORING"
            elif live.generation is not None:
                state = "GENERATING"
        if row.migration and row.state is SessionState.ACTIVE:
            state = "MIGRATING"
        usage = Usage(0, 0)
        if row.state is not SessionState.DELETED:
            usage = await self._usage.count(row.name, row.branch, row.head)
        return SessionView(row, state, consumed, node, await self._estimate(row), usage)

    async def _estimate(self, row: SessionRow) -> float:
        """Seconds that a restore would take, from what this node measured: load and replay. 0 until it measured."""
        if row.state is SessionState.DELETED or row.head == 0:
            return 0.0
        counters = self._core.counters
        grid = await self._newest_grid(row.name)
        seconds = 0.0
        if counters.prefill_tokens_per_second > 0:
            seconds += (row.head - grid) / counters.prefill_tokens_per_second
        if grid > 0 and counters.restore_bytes_per_second > 0 and counters.restores > 0:
            seconds += counters.restored_bytes / counters.restores / counters.restore_bytes_per_second
        return seconds

    async def _newest_grid(self, name: SessionName) -> int:
        live = self._core.lives.get(name)
        if live is not None:
            return min(live.last_grid, live.head)
        checkpoints = await self._core.catalog.list_checkpoints(name)
        return max((checkpoint.grid_position for checkpoint in checkpoints), default=0)
