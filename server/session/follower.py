"""A session of another node that this one brings along: its state and its log, and no right to it."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import groupby

from forkpoint.errors import AbortedError
from forkpoint.ids import SessionName
from forkpoint.server.session.live import LiveSession, Place
from forkpoint.server.session.ports import FollowAsk, FollowReport, TailedTokens
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.records import Kind, LogSlice, SessionRow


class Follower:
    """`live` is what a session of one's own is made of, so that a follower that becomes the owner goes on at once; it
    is in `core.follows` instead of `core.lives` until then. `live.gone`: why it was given up.

    `turn` is held by whoever restores it anew or makes it the owner's: meanwhile nobody else may take it away, but for
    its own failure.
    """

    def __init__(
        self, row: SessionRow, ask: FollowAsk, number: int, own: Callable[[SessionName], Awaitable[object]]
    ) -> None:
        self.name: SessionName = row.name
        self.live = LiveSession(row)
        self.ask = ask
        """The newest one."""
        self.number = number
        """Grows with each follower of the node."""
        self.asking: dict[int, str] = {}
        """Migration ("" for a standby) of each stream that follows it now."""
        self.turn = asyncio.Lock()
        self.tailing: asyncio.Task[None] | None = None
        self.owned = False
        self.unsure = False
        """A generation may run that is not known here."""
        self._chain: HashChain | None = None
        self._own = own

    async def promote(self) -> None:
        """Take the session, whose owner is dead: it goes on from this state. Raises what taking it raises."""
        await self._own(self.name)

    @property
    def migrates(self) -> bool:
        """Whether a migration waits for it."""
        return any(self.asking.values())

    @property
    def ready(self) -> bool:
        """Whether its state is on the engine."""
        return self.live.place is Place.RESIDENT and self.live.gone is None and self._chain is not None

    def report(self) -> FollowReport | None:
        """How far it is; None before it is restored."""
        restored = self.live.restored
        if restored is None or not self.ready:
            return None
        return FollowReport(restored.position, restored.bytes, self.live.consumed, self.live.head)

    def begin(self, row: SessionRow) -> LiveSession:
        """Start anew from the row: what was known is of no use."""
        old, self.live = self.live, LiveSession(row)
        self._chain = None
        old.changed.fire()
        return old

    def restored(self) -> None:
        """The state is on the engine, and the log is known up to the head of the row that it began with."""
        live = self.live
        assert live.chain is not None
        self._chain = live.chain.copy()
        self._chain.extend(live.tail.tokens(live.consumed, live.head))
        live.place = Place.RESIDENT
        live.changed.fire()

    def take(self, part: TailedTokens | LogSlice) -> None:
        """Tokens of the log; those that are known already are left out. Raises AbortedError for a gap."""
        live, at = self.live, self.live.head - part.start
        if at < 0:
            raise AbortedError(f"{self.name}: tokens from {part.start} on, {live.head} are known")
        assert self._chain is not None
        for kind, run in groupby(part.kinds[at:]):
            count = sum(1 for _ in run)
            tokens, logprobs = part.token_ids[at : at + count], part.logprobs[at : at + count]
            self._chain.extend(tokens)
            live.grow(tokens, kind, self._chain.head_hash(), logprobs)
            self._feed(kind, part.start + at, tokens)
            at += count
        live.consumed_once = live.head

    def _feed(self, kind: Kind, start: int, tokens: tuple[int, ...]) -> None:
        """What these tokens mean for the generation that is known, which may begin behind them: it was learned of
        before the end of the one before it was read."""
        generation = self.live.generation
        if generation is not None and start < generation.row.start:
            tokens = tokens[generation.row.start - start :]
            if not tokens:
                return
        if kind is Kind.PROMPT:
            self.live.generation, self.unsure = None, False
        elif generation is None or generation.is_complete:
            self.live.generation, self.unsure = None, True
        else:
            generation.feed(tokens)
