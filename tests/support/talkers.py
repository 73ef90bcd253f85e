"""Clients that talk to a server which may die at any moment, and remember every token they were shown."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from forkpoint.client.client import Client
from forkpoint.client.errors import RemoteError
from forkpoint.client.session import Session

T = TypeVar("T")
WORKFLOW: Final = "kills"
RETRY_SECONDS: Final = 0.05


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call (its request id makes it one call) until a server answers it. Refusals are raised."""
    while True:
        try:
            return await call()
        except RemoteError as error:
            if not error.is_transport and error.code != "DEADLINE_EXCEEDED":
                raise
            await asyncio.sleep(RETRY_SECONDS)


@dataclass
class Talker:
    """One session and its turns. Turn n is the same whoever asks for it, so that another run can be compared."""

    session: Session
    turns: int = 0
    """Turns that were finished."""
    seen: dict[int, int] = field(default_factory=dict)
    """Position -> token id, of all that was acknowledged or streamed."""
    reconnects: int = 0
    children: "list[Talker]" = field(default_factory=list)

    @property
    def short(self) -> str:
        return self.session.name.rpartition("/")[2]

    def saw(self, start: int, token_ids: list[int]) -> None:
        """Remember tokens; a position that was shown before must show the same token."""
        for position, token in enumerate(token_ids, start):
            assert self.seen.setdefault(position, token) == token, f"{self.short}: position {position} changed"

    async def turn(self) -> None:
        """Append, generate, and sometimes fork a child that generates too."""
        number, name = self.turns, self.short
        text = f"# turn {number} of {name}\ndef f{number}(x):\n    return x + {number}\n".encode()
        added = await insist(lambda: self.session.append(text=text, request_id=f"{name}-{number}-append"))
        self.saw(added.start, list(added.token_ids))
        await self._generate(f"{name}-{number}-generate", max_tokens=8 + 5 * (number % 4), hot=number % 2 == 1)
        if number % 3 == 2:
            await self._fork(number)
        self.turns += 1

    async def _generate(self, request_id: str, max_tokens: int, hot: bool) -> None:
        generation = self.session.generate(
            messages=[("user", "continue")],
            add_generation_prompt=True,
            max_tokens=max_tokens,
            temperature=0.9 if hot else 0.0,
            top_k=40 if hot else 0,
            top_p=0.95 if hot else None,
            request_id=request_id,
        )
        async for chunk in generation:
            self.saw(chunk.start, list(chunk.token_ids))
        self.reconnects += len(generation.reconnects)

    async def _fork(self, number: int) -> None:
        child_id = f"{self.short}-child-{number}"
        children = await insist(
            lambda: self.session.fork(session_ids=[child_id], request_id=f"{self.short}-{number}-fork")
        )
        child = Talker(children[0])
        await child._generate(f"{child_id}-generate", max_tokens=12, hot=True)
        self.children.append(child)

    async def log(self) -> tuple[list[int], list[int]]:
        """(token ids, kinds) of the whole log."""
        ids, kinds = list[int](), list[int]()
        async for chunk in self.session.tokens():
            ids += chunk.token_ids
            kinds += [int(kind) for kind in chunk.kinds]
        return ids, kinds

    def check(self, ids: list[int], seen: dict[int, int]) -> None:
        """Every token of `seen` is in the log."""
        lost = [p for p, token in seen.items() if p >= len(ids) or ids[p] != token]
        assert lost == [], f"{self.short}: positions {lost[:5]} were shown and are not in the log of {len(ids)}"


async def open_talkers(client: Client, count: int, every_tokens: int) -> list[Talker]:
    """`count` new sessions with fixed names and seeds."""
    await insist(lambda: client.workflows.create(WORKFLOW, request_id="workflow"))
    talkers = []
    for number in range(count):
        session = await client.sessions.create(
            WORKFLOW, f"s{number}", seed=1000 + number, every_tokens=every_tokens, request_id=f"create-{number}"
        )
        talkers.append(Talker(session))
    return talkers


def everybody(talkers: list[Talker]) -> list[Talker]:
    """Talkers and their children."""
    return [one for talker in talkers for one in (talker, *talker.children)]
