"""Readers: cursors over the log. What a reader has not fetched is not kept for it; it re-reads by position."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from forkpoint.errors import (
    AbortedError,
    LogTailMissingError,
    NodeDrainingError,
    NotFoundError,
    PositionBeyondHeadError,
    SessionRelocatingError,
    UnavailableError,
)
from forkpoint.ids import SessionName
from forkpoint.limits import STREAM_BUFFER_TOKENS
from forkpoint.server.session.api import Chunk, Finished, GenerateEvent, Started, Usage
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.generation import RunningGeneration
from forkpoint.server.session.live import LiveSession
from forkpoint.server.session.text import TextTrail
from forkpoint.server.session.usage import UsageCounter
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.records import FinishReason, GenerationRow, LogSlice, NodeRow, SessionRow

FOLLOW_POLL_SECONDS: Final = 0.5
"""A follower of a session that nobody owns looks at the store this often."""


class LogCursor:
    """Reads one branch of a session from a position on: the live tail when it reaches so far back, else the store.

    `last`: a live session to read from when the node has it no longer: what its tail holds was committed.
    """

    def __init__(
        self, core: NodeCore, name: SessionName, branch: str, position: int, last: LiveSession | None = None
    ) -> None:
        self._core = core
        self._last = last
        self._name = name
        self._branch = branch
        self.position = position

    async def next(self, end: int | None) -> LogSlice:
        """Up to STREAM_BUFFER_TOKENS committed tokens, not beyond `end`; none at the head.

        Raises AbortedError when the name points at another branch now.
        """
        live = self._core.lives.get(self._name, self._last)
        known = live is not None and live.row.branch == self._branch
        if live is not None and known and live.tail.start <= self.position <= live.tail.end:
            stop = min(live.head if end is None else min(end, live.head), self.position + STREAM_BUFFER_TOKENS)
            part = live.tail.slice(self.position, max(stop, self.position))
            if not part.token_ids and end is not None and end > live.head:
                # The store may know more than this node, when an answer was lost.
                part = await self._from_store(end - self.position)
        else:
            part = await self._from_store(STREAM_BUFFER_TOKENS if end is None else end - self.position)
        self.position += len(part.token_ids)
        return part

    async def _from_store(self, limit: int) -> LogSlice:
        if limit <= 0:
            return LogSlice(self.position, (), (), ())
        try:
            part = await self._core.catalog.read_log(self._name, self.position, min(limit, STREAM_BUFFER_TOKENS))
        except PositionBeyondHeadError:
            await self._check_branch()
            raise
        await self._check_branch()
        return part

    async def _check_branch(self) -> None:
        row = await self._core.catalog.get_session(self._name)
        if row.branch != self._branch:
            raise AbortedError(f"{self._name} was rewound: position {self.position} is on a branch it left")


def text_of(trail: TextTrail, part: LogSlice) -> bytes:
    """The text that these tokens let out."""
    return b"".join([trail.feed(token_id) for token_id in part.token_ids])


class GenerationStream:
    """One reader of one generation, from `resume_position` to its end."""

    def __init__(
        self,
        core: NodeCore,
        usage: UsageCounter,
        row: GenerationRow,
        branch: str,
        live: LiveSession | None,
        running: RunningGeneration | None,
    ) -> None:
        self._core = core
        self._usage = usage
        self._row = row
        self._branch = branch
        self._live = live
        self._running = running
        self._trouble = 0 if live is None else live.trouble[0]
        params = row.params
        self._trail = TextTrail(row.start, core.codec.token_bytes, params.stop_text, params.stop_ids)

    async def events(self, resume_position: int | None, head: int, epoch: int) -> AsyncIterator[GenerateEvent]:
        """Started, chunks, Finished. Raises LogTailMissingError for a position that the log never reached."""
        row = self._row
        position = row.start if resume_position is None else max(resume_position, row.start)
        over = self._end()
        last = head if over is None else over[1]
        if position > last:
            raise LogTailMissingError(str(row.session), position, last)
        yield Started(row, head, epoch)
        cursor = LogCursor(self._core, row.session, self._branch, row.start, self._live)
        while cursor.position < position:
            text_of(self._trail, await self._warm_up(cursor, position))
        while True:
            ended = self._end()
            part = await cursor.next(None if ended is None else ended[1])
            if part.token_ids:
                yield self._chunk(part, text_of(self._trail, part), epoch)
            elif ended is not None:
                break
            else:
                await self._wait(cursor.position)
        rest = self._trail.flush()
        reason, end = ended
        if rest:
            yield self._chunk(LogSlice(end, (), (), ()), rest, epoch)
        yield await self._finished(reason, end)

    async def _warm_up(self, cursor: LogCursor, position: int) -> LogSlice:
        part = await cursor.next(position)
        if not part.token_ids:
            raise LogTailMissingError(str(self._row.session), position, cursor.position)
        return part

    def _end(self) -> tuple[FinishReason, int] | None:
        if self._running is not None and self._running.finish is not None:
            return self._running.finish, self._running.end
        if self._row.finish is not None and self._row.end is not None:
            return self._row.finish, self._row.end
        return None

    async def _wait(self, position: int) -> None:
        """Until something changed; raises why the reader can't be served further."""
        live = self._live
        if live is None or self._running is None:
            raise UnavailableError(f"{self._row.session}: the generation is not running here; call again")
        number, error = live.trouble
        if number != self._trouble and error is not None:
            raise error
        if live.gone is not None:
            if isinstance(live.gone, NodeDrainingError):
                raise NodeDrainingError(live.gone.node, position)
            raise live.gone
        await live.changed.wait()

    def _chunk(self, part: LogSlice, text: bytes, epoch: int) -> Chunk:
        live_epoch = epoch if self._live is None else self._live.epoch
        return Chunk(part.start, part.token_ids, part.kinds, text, part.logprobs, live_epoch)

    async def _finished(self, reason: FinishReason, end: int) -> Finished:
        usage = await self._usage_at(end)
        head_hash = self._running.end_hash if self._running is not None and self._running.end_hash else b""
        if not head_hash:
            head_hash = await self._hash_at(end)
        return Finished(reason, end, head_hash, usage, self._trail.stop_position)

    async def _usage_at(self, end: int) -> Usage:
        try:
            return await self._usage.count(self._row.session, self._branch, end)
        except NotFoundError:
            if self._running is None or self._running.usage is None:
                raise
            return self._running.usage

    async def _hash_at(self, end: int) -> bytes:
        session = await self._core.catalog.get_session(self._row.session)
        if session.branch == self._branch and session.head == end:
            return session.head_hash
        chain = HashChain.root(self._core.marker)
        cursor = LogCursor(self._core, self._row.session, self._branch, 0)
        while cursor.position < end:
            chain.extend((await self._warm_up(cursor, end)).token_ids)
        return chain.head_hash()


async def read_tokens(
    core: NodeCore,
    foreign_owner: Callable[[SessionRow], Awaitable[NodeRow | None]],
    name: SessionName,
    start: int,
    end: int | None,
    follow: bool,
) -> AsyncIterator[Chunk]:
    """Committed tokens of [start, end), to the head when `end` is None; `follow`: and what comes, until `end`.

    Raises NotFoundError, PositionBeyondHeadError; AbortedError when the session is rewound meanwhile. What there is can
    be read at any node; what comes is told by the session's owner, so SessionRelocatingError when it has another.
    """
    row = await _looked_up(core, name)
    if row.delete_us is not None or start > row.head or (end is not None and not follow and end > row.head):
        # The store says which error it is.
        await core.catalog.read_log(name, max(start, row.head + 1) if row.delete_us is None else 0, 1)
    stop = end if follow else (row.head if end is None else end)
    cursor = LogCursor(core, name, row.branch, start)
    trail = TextTrail(start, core.codec.token_bytes)
    while stop is None or cursor.position < stop:
        part = await cursor.next(stop)
        if part.token_ids:
            yield Chunk(part.start, part.token_ids, part.kinds, text_of(trail, part), part.logprobs, row.epoch)
        elif core.draining:
            raise NodeDrainingError(core.options.node, cursor.position)
        else:
            await _changed(core, foreign_owner, name)
    rest = trail.flush()
    if rest:
        yield Chunk(cursor.position, (), (), rest, (), row.epoch)


async def _looked_up(core: NodeCore, name: SessionName) -> SessionRow:
    """The session's row. Raises UnavailableError when the store lost the end of a log that this node knows: nobody is
    shown it any more."""
    live = core.lives.get(name)
    head = 0 if live is None else live.head
    row = await core.catalog.get_session(name)
    if live is not None and live.row.branch == row.branch and row.head < head:
        live.suspect = True
        core.wake()
        raise UnavailableError(f"{name}: the store lost the end of its log: it knows {row.head} tokens; call again")
    return row


async def _changed(
    core: NodeCore, foreign_owner: Callable[[SessionRow], Awaitable[NodeRow | None]], name: SessionName
) -> None:
    """Until the session may have grown."""
    live = core.lives.get(name)
    if live is None:
        node = await foreign_owner(await core.catalog.get_session(name))
        if node is not None:
            raise SessionRelocatingError(str(name), node.node, node.address)
        await asyncio.sleep(FOLLOW_POLL_SECONDS)
        return
    try:
        async with asyncio.timeout(FOLLOW_POLL_SECONDS):
            await live.changed.wait()
    except TimeoutError:
        return
