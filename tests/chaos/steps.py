"""The steps of a move, at which a server can be made to wait while its driver does something to somebody."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, cast

from forkpoint.server.rpc.peers import GrpcPeers
from forkpoint.server.session.ports import CutOverAsk, FollowAsk, FollowReport
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.records import NodeRow
from tests.chaos.gate import Gate

CATALOG: Final = frozenset(
    {"begin_migration", "get_session", "find_manifests", "open_generation", "cut_over", "commit_step"}
)


class SteppedCatalog:
    """Stands for a catalog, and comes to a step before and after some of its calls."""

    def __init__(self, inner: Catalog, gate: Gate) -> None:
        self._inner, self._gate = inner, gate

    @property
    def port(self) -> Catalog:
        """The same, typed as what it stands for."""
        return cast(Catalog, self)

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._inner, name)
        if name not in CATALOG:
            return target

        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._gate.reach(f"{name}.before")
            result = await cast(Callable[..., Awaitable[Any]], target)(*args, **kwargs)
            await self._gate.reach(f"{name}.after")
            return result

        return call


def step_peers(gate: Gate) -> None:
    """Let this process's calls to other nodes come to steps."""
    cut_over, follow = GrpcPeers.cut_over, GrpcPeers.follow

    async def stepped_cut_over(self: GrpcPeers, node: NodeRow, ask: CutOverAsk, timeout_seconds: float) -> int:
        await gate.reach("peer_cut_over.before")
        epoch = await cut_over(self, node, ask, timeout_seconds)
        await gate.reach("peer_cut_over.after")
        return epoch

    async def stepped_follow(self: GrpcPeers, node: NodeRow, ask: FollowAsk) -> AsyncGenerator[FollowReport, None]:
        await gate.reach("follow.before")
        step = "follow.restored"
        async with aclosing(follow(self, node, ask)) as reports:
            async for report in reports:
                await gate.reach(step)
                step = "follow.near"
                yield report

    GrpcPeers.cut_over = stepped_cut_over  # type: ignore[method-assign]
    GrpcPeers.follow = stepped_follow  # type: ignore[method-assign]
