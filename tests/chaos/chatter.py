"""A session's whole life as its client plans it: appends, streams and forks, the same whoever serves it."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from forkpoint.client.client import Client
from forkpoint.client.errors import RemoteError
from forkpoint.client.session import Session
from tests.support.talkers import Talker, insist

T = TypeVar("T")
WORKFLOW: Final = "chaos"
EVERY_TOKENS: Final = 64
"""Tokens between checkpoints."""
CHILDREN_MAX: Final = 2


@dataclass(frozen=True, slots=True)
class Turn:
    """One append, one stream, and perhaps forks."""

    text: bytes
    tokens: int
    hot: bool
    children: tuple[int, ...]
    """Tokens that each child generates."""


def plan(seed: int, number: int, tokens: int) -> tuple[Turn, ...]:
    """Session `number`'s turns; streams of up to `tokens` tokens."""
    rng = random.Random(f"chatter {seed} {number}")
    turns = []
    for turn in range(rng.randint(1, 4)):
        text = f"# turn {turn} of {number}\ndef f{number}(x):\n    return x * {rng.randrange(1000)}\n"
        children = [rng.randint(1, tokens // 2) for _ in range(rng.choice((0, 0, 1, CHILDREN_MAX)))]
        turns.append(
            Turn(text.encode() * rng.randint(1, 4), rng.randint(4, tokens), rng.random() < 0.5, tuple(children))
        )
    return tuple(turns)


@dataclass
class Chatter(Talker):
    """A talker with a plan. Its children say one thing each."""

    turns_planned: tuple[Turn, ...] = ()
    quarantines: int = 0
    """How often it lost too many owners, without a token of progress, and was released."""
    shown: Callable[[int], None] = lambda count: None
    """Told of every token that its streams showed."""

    def saw(self, start: int, token_ids: list[int]) -> None:
        """As Talker.saw."""
        super().saw(start, token_ids)
        self.shown(len(token_ids))

    async def live(self, over: Callable[[], bool]) -> None:
        """All turns, or those that begin before it is over."""
        for turn in self.turns_planned:
            if over():
                return
            await self._take(turn)
            self.turns += 1

    async def _generate(self, request_id: str, max_tokens: int, hot: bool) -> None:
        """As Talker's; a session that lost three owners in a row is let out of its quarantine."""
        while True:
            try:
                return await super()._generate(request_id, max_tokens, hot)
            except RemoteError as error:
                await self._release(error)

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await insist(call)
            except RemoteError as error:
                await self._release(error)

    async def _release(self, error: RemoteError) -> None:
        """Raises the error when it is another one."""
        if error.reason != "SESSION_QUARANTINED":
            raise error
        self.quarantines += 1
        try:
            await insist(self.session.release_quarantine)
        except RemoteError as refused:
            if refused.code != "FAILED_PRECONDITION":  # it is out already
                raise

    async def _take(self, turn: Turn) -> None:
        number, name = self.turns, self.short
        added = await self._insist(lambda: self.session.append(text=turn.text, request_id=f"{name}-{number}-append"))
        self.saw(added.start, list(added.token_ids))
        await self._generate(f"{name}-{number}-generate", turn.tokens, turn.hot)
        ids = [f"{name}-{number}-{child}" for child in range(len(turn.children))]
        if not ids:
            return
        forked = await self._insist(lambda: self.session.fork(session_ids=ids, request_id=f"{name}-{number}-fork"))
        for session, tokens in zip(forked, turn.children, strict=True):
            child = Chatter(session, shown=self.shown)
            await child._generate(f"{child.short}-generate", tokens, True)
            self.children.append(child)


@dataclass
class Story:
    """One planned session, told by one client."""

    seed: int
    number: int
    tokens: int
    turns: int | None = None
    """How many of the turns it has; None: all. Once it is told: how many it had."""
    family: list[Chatter] = field(default_factory=list)
    session: Session | None = None

    async def tell(
        self,
        client: Client,
        shown: Callable[[int], None] = lambda count: None,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make the session and live its life, without the turns that would begin after it is over."""
        self.session = session = await insist(lambda: self._create(client))
        chatter = Chatter(session, turns_planned=plan(self.seed, self.number, self.tokens)[: self.turns], shown=shown)
        await chatter.live(over)
        self.turns = chatter.turns
        self.family = [chatter, *(child for child in chatter.children if isinstance(child, Chatter))]

    async def _create(self, client: Client) -> Session:
        return await client.sessions.create(
            WORKFLOW,
            f"s{self.number}",
            seed=1000 + self.number,
            every_tokens=EVERY_TOKENS,
            request_id=f"create-{self.number}",
        )


async def open_workflow(client: Client) -> None:
    """The one that all sessions are in."""
    await insist(lambda: client.workflows.create(WORKFLOW, request_id="workflow"))
