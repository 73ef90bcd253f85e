"""The demo's script: the same prompts on both sides, once with everything that can happen to a session in between."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from forkpoint.cli.demo.report import Answer, SessionResult, Step
from forkpoint.client.client import Client
from forkpoint.client.generation import Generation
from forkpoint.client.session import Session
from forkpoint.clock import Clock
from forkpoint.errors import ForkpointError
from forkpoint.model.tiny.data import make_document

WORKFLOW: Final = "demo"
READER: Final = "reader"
CHILDREN: Final = ("child-a", "child-b", "child-c")
SESSION_SEED: Final = 20261130
DOCUMENT_SEED: Final = 4_000_017
DOCUMENT_BYTES: Final = 4000
MEMOS: Final = 8
CHECKPOINT_EVERY_TOKENS: Final = 512
ANSWER_TOKENS_MAX: Final = 16
CONTINUE_TOKENS_READER: Final = 96
CONTINUE_TOKENS_CHILD: Final = 32
KILL_AFTER_TOKENS: Final = 16
"""Tokens that the reader's client has seen when the server is killed."""


@dataclass(frozen=True)
class Remains:
    """What a killed server left of a session."""

    head: int
    """Tokens in the log."""
    checkpoint: int
    """Position of the newest checkpoint that a session about to sample can be restored from; 0 without one."""


@dataclass(frozen=True)
class Interruptions:
    """What happens to the sessions on the interrupted side."""

    kill_and_restart: Callable[[], Awaitable[dict[str, Remains]]]
    """kill -9 the server and start it again; what the store held of each session (by name) in between."""
    second_server: Callable[[], Awaitable[Client]]
    """A client of the second server."""


class DemoError(ForkpointError):
    """The demo could not do what it meant to show."""

    reason = "DEMO"


def recall(key: str) -> list[tuple[str, str | bytes]]:
    """A user turn that asks for a planted fact."""
    return [("user", f"recall {key}")]


class Story:
    """One side. `interruptions` None: nothing ever happens to the sessions."""

    def __init__(
        self,
        client: Client,
        clock: Clock,
        told: Callable[[Step], None],
        interruptions: Interruptions | None = None,
    ) -> None:
        self.client, self.clock, self.told, self.interruptions = client, clock, told, interruptions
        document, facts = make_document(DOCUMENT_SEED, DOCUMENT_BYTES, MEMOS)
        self.document: bytes = document
        self.facts: list[tuple[str, str]] = list(facts.items())
        self.answers: list[Answer] = []
        self.reader: Session
        self.children: list[Session] = []
        self._began = clock.monotonic()

    async def tell(self) -> dict[str, SessionResult]:
        """Run the script; returns every session's end."""
        await self._open()
        await self._ask_children()
        await self._continue_all()
        await self._move()
        await self._rewind()
        return await self._compare()

    def _done(
        self,
        what: str,
        generated: int | None = None,
        restored: int | None = None,
        replayed: int | None = None,
        stored: int | None = None,
        shared: int | None = None,
    ) -> None:
        """Tell a step that began when the one before it ended."""
        now = self.clock.monotonic()
        self.told(
            Step(
                what,
                now - self._began,
                generated=generated,
                restored=restored,
                replayed=replayed,
                stored=stored,
                shared=shared,
            )
        )
        self._began = now

    async def _open(self) -> None:
        every = CHECKPOINT_EVERY_TOKENS if self.interruptions else 0
        await self.client.workflows.create(WORKFLOW)
        self.reader = await self.client.sessions.create(WORKFLOW, READER, seed=SESSION_SEED, every_tokens=every)
        await self.reader.append(text=self.document)
        self._done(f"append a document of {DOCUMENT_BYTES:,} bytes, with {MEMOS} facts in it")
        count = await self._ask(self.reader, 0)
        self._done("read the document, recall a fact", generated=count)

    async def _ask_children(self) -> None:
        self.children = await self.reader.fork(len(CHILDREN), session_ids=CHILDREN)
        self._done(f"fork {len(CHILDREN)} children")
        counts = await asyncio.gather(*(self._ask(child, 1 + n) for n, child in enumerate(self.children)))
        self._done("ask each child for another fact, all at once", generated=sum(counts))

    async def _continue_all(self) -> None:
        """All four sessions write on; the server is killed in the middle."""
        limits = [CONTINUE_TOKENS_READER, *(CONTINUE_TOKENS_CHILD for _ in self.children)]
        generations = [
            session.generate(
                messages=[("user", "continue")],
                add_generation_prompt=True,
                max_tokens=limit,
                temperature=0.7,
                top_p=0.95,
            )
            for session, limit in zip([self.reader, *self.children], limits, strict=True)
        ]
        enough = asyncio.Event()
        remains = dict[str, Remains]()
        async with asyncio.TaskGroup() as group:
            if self.interruptions is not None:
                group.create_task(self._kill_when(enough, generations[0], remains))
            for generation in generations:
                group.create_task(_follow(generation, enough if generation is generations[0] else None))
        generated = sum(len(generation.token_ids) for generation in generations)
        if self.interruptions is None:
            self._done("all four write on", generated=generated)
            return
        broken = [generation.request.name for generation in generations if generation.reconnects]
        self._done(
            f"all four write on; kill -9, restart; {len(broken)} streams go on",
            generated=generated,
            restored=sum(remains[name].checkpoint for name in broken),
            replayed=sum(remains[name].head - remains[name].checkpoint for name in broken),
        )

    async def _kill_when(self, enough: asyncio.Event, generation: Generation, remains: dict[str, Remains]) -> None:
        await enough.wait()
        assert self.interruptions is not None
        if generation.finished is not None:
            raise DemoError("the generation ended before the server could be killed in the middle of it")
        remains.update(await self.interruptions.kill_and_restart())

    async def _move(self) -> None:
        """The reader moves to a second server."""
        if self.interruptions is not None:
            await self.reader.pause()
            second = await self.interruptions.second_server()
            self.reader = second.sessions.open(self.reader.name)
            answer = await self.reader.resume()
            self._done(
                "pause the reader, resume it on a second server",
                restored=answer.restored_tokens,
                replayed=answer.replayed_tokens,
            )
        count = await self._ask(self.reader, 4)
        self._done("ask the reader for a fact", generated=count)

    async def _rewind(self) -> None:
        """The undisturbed side never takes the turn that the other one takes back."""
        if self.interruptions is not None:
            position = (await self.reader.get()).head
            count = await self._ask(self.reader, 5)
            await self.reader.rewind(position)
            self._done("take another turn, and rewind to before it", generated=count)
        count = await self._ask(self.reader, 6)
        self._done("take the turn again, otherwise", generated=count)

    async def _compare(self) -> dict[str, SessionResult]:
        results = dict[str, SessionResult]()
        stored = shared = 0
        for session in (self.reader, *self.children):
            checkpoint = await session.checkpoint()
            stored, shared = stored + checkpoint.bytes_stored, shared + checkpoint.bytes_shared
            tokens = await session.tokens().result()
            parts = {part.name: part.blake3 for part in checkpoint.parts}
            results[session.name.rpartition("/")[2]] = SessionResult(tuple(tokens.token_ids), parts)
        self._done("checkpoint all sessions", stored=stored, shared=shared)
        return results

    async def _ask(self, session: Session, fact: int) -> int:
        """Ask for a fact; returns the number of generated tokens."""
        key, planted = self.facts[fact]
        generation = await session.generate(
            messages=recall(key), add_generation_prompt=True, max_tokens=ANSWER_TOKENS_MAX
        ).result()
        said = generation.text.decode(errors="replace")
        self.answers.append(Answer(session.name.rpartition("/")[2], f"recall {key}", said, planted))
        return len(generation.token_ids)


async def _follow(generation: Generation, enough: asyncio.Event | None) -> None:
    """Read a generation to its end; the client refuses a stream with a gap or a repeated position."""
    async for _ in generation:
        if enough is not None and len(generation.token_ids) >= KILL_AFTER_TOKENS:
            enough.set()
    if enough is not None:
        enough.set()
