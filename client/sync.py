"""The client for code without an event loop: `with Client("127.0.0.1:50061") as client: …`.

Names, parameters and errors are those of the asynchronous client; calls block, and streams are iterators. Any thread
may call any method, one that runs an event loop of its own too, which stands still meanwhile. All clients of a process
share one thread of their own. A process that was forked after the first call can make none (ForkedProcessError).
"""

from __future__ import annotations  # the twins name each other

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from forkpoint.client import client as aio
from forkpoint.client import generation, nodes, session
from forkpoint.client.background import Hold
from forkpoint.client.blocking import Items, Twin, blocking, iterating, telling
from forkpoint.client.errors import RemoteError
from forkpoint.clock import Clock
from forkpoint.proto.forkpoint.v1 import export_pb2
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb

P = ParamSpec("P")
T = TypeVar("T")
_END = object()


class Client(Twin[aio.Client]):
    """A connection to the service at one or more addresses; see the asynchronous client for the parameters."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        patience_s: float = 60.0,
        direct: bool = False,
        clock: Clock | None = None,
    ) -> None:
        inner = aio.Client(addresses, patience_s=patience_s, direct=direct, clock=clock)
        super().__init__(Hold(inner.close), inner)
        self.workflows = Workflows(self._hold, inner.workflows)
        self.sessions = Sessions(self._hold, inner.sessions)
        self.checkpoints = Checkpoints(self._hold, inner.checkpoints)
        self.nodes = Nodes(self._hold, inner.nodes)
        self.garbage = Garbage(self._hold, inner.garbage)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; calls under way in other threads and later ones raise ClientClosedError. Idempotent.
        A client that nobody closes ends with the last object that came of it."""
        self._hold.release()

    ready = blocking(aio.Client.ready)


class Workflows(Twin[aio.Workflows]):
    """All workflows of the service."""

    create = blocking(aio.Workflows.create)
    get = blocking(aio.Workflows.get)
    list = iterating(aio.Workflows.list)
    update = blocking(aio.Workflows.update)
    delete = blocking(aio.Workflows.delete)
    usage = blocking(aio.Workflows.usage)
    session_usage = iterating(aio.Workflows.session_usage)


class Checkpoints(Twin[aio.Checkpoints]):
    """Checkpoints by name; Session.checkpoint makes them."""

    get = blocking(aio.Checkpoints.get)
    list = iterating(aio.Checkpoints.list)
    delete = blocking(aio.Checkpoints.delete)
    verify = telling(aio.Checkpoints.verify)


class Garbage(Twin[aio.Garbage]):
    """What nobody needs any more."""

    collect = telling(aio.Garbage.collect)


class Nodes(Twin[nodes.Nodes]):
    """All nodes, through whichever of them answers."""

    list = iterating(nodes.Nodes.list)
    get = blocking(nodes.Nodes.get)
    watch = telling(nodes.Nodes.watch)
    drain = telling(nodes.Nodes.drain)
    undrain = blocking(nodes.Nodes.undrain)
    rebalance = telling(nodes.Nodes.rebalance)


class Generation(Twin[generation.Generation], Iterator[pb.TokenChunk]):
    """Iterate over it for chunks of tokens, or ask for `result()`. Each position comes exactly once, in order. Leaving
    the iteration (or `detach`) leaves the generation running, unless it was asked to cancel on disconnect."""

    def __init__(self, hold: Hold, inner: generation.Generation) -> None:
        super().__init__(hold, inner)
        self._items = Items(hold, inner)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pb.TokenChunk:
        return next(self._items)

    def result(self) -> Self:
        """Read to the end."""
        self._hold.run(self._inner.result())
        return self

    detach = blocking(generation.Generation.detach)

    @property
    def request(self) -> pb.GenerateRequest:
        """As it was sent first."""
        return self._inner.request

    @property
    def started(self) -> pb.Started | None:
        """The stream's first answer (the latest, when it was opened again); None before it came."""
        return self._inner.started

    @property
    def finished(self) -> pb.Finished | None:
        """Last answer, None before it came."""
        return self._inner.finished

    @property
    def position(self) -> int | None:
        """Position of the next token, None before the generation started."""
        return self._inner.position

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far."""
        return list(self._inner.token_ids)

    @property
    def logprobs(self) -> list[float]:
        """Of the tokens so far, when they were asked for."""
        return list(self._inner.logprobs)

    @property
    def reconnects(self) -> list[RemoteError]:
        """Why the stream was opened again, once for each time."""
        return list(self._inner.reconnects)

    @property
    def text(self) -> bytes:
        """The text so far: whole UTF-8 characters."""
        return self._inner.text


class TokenReader(Twin[generation.TokenReader], Iterator[pb.TokenChunk]):
    """Committed tokens by position, each exactly once. With `follow`, those to come as well."""

    def __init__(self, hold: Hold, inner: generation.TokenReader) -> None:
        super().__init__(hold, inner)
        self._items = Items(hold, inner)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pb.TokenChunk:
        return next(self._items)

    def result(self) -> Self:
        """Read to the end."""
        self._hold.run(self._inner.result())
        return self

    detach = blocking(generation.TokenReader.detach)

    @property
    def request(self) -> pb.ReadTokensRequest:
        """As it was sent first."""
        return self._inner.request

    @property
    def position(self) -> int:
        """Position of the next token."""
        return self._inner.position

    @property
    def token_ids(self) -> list[int]:
        """The tokens read so far."""
        return list(self._inner.token_ids)

    @property
    def reconnects(self) -> list[RemoteError]:
        """Why the stream was opened again, once for each time."""
        return list(self._inner.reconnects)

    @property
    def text(self) -> bytes:
        """The text read so far."""
        return self._inner.text


def _generating(
    method: Callable[Concatenate[Any, P], generation.Generation],
) -> Callable[Concatenate[Any, P], Generation]:
    @functools.wraps(method)
    def call(self: Twin[Any], /, *args: P.args, **kwargs: P.kwargs) -> Generation:
        return Generation(self._hold, method(self._inner, *args, **kwargs))

    return call


def _reading(
    method: Callable[Concatenate[Any, P], generation.TokenReader],
) -> Callable[Concatenate[Any, P], TokenReader]:
    @functools.wraps(method)
    def call(self: Twin[Any], /, *args: P.args, **kwargs: P.kwargs) -> TokenReader:
        return TokenReader(self._hold, method(self._inner, *args, **kwargs))

    return call


def _opening(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, session.Session]],
) -> Callable[Concatenate[Any, P], Session]:
    @functools.wraps(method)
    def call(self: Twin[Any], /, *args: P.args, **kwargs: P.kwargs) -> Session:
        return Session(self._hold, self._hold.run(method(self._inner, *args, **kwargs)))

    return call


def _forking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, list[session.Session]]],
) -> Callable[Concatenate[Any, P], list[Session]]:
    @functools.wraps(method)
    def call(self: Twin[Any], /, *args: P.args, **kwargs: P.kwargs) -> list[Session]:
        children = self._hold.run(method(self._inner, *args, **kwargs))
        return [Session(self._hold, child) for child in children]

    return call


class Session(Twin[session.Session]):
    """One session by name. Holds no state of its own: every method asks the service, and raises RemoteError."""

    @property
    def name(self) -> str:
        """workflows/{w}/sessions/{s}"""
        return self._inner.name

    def __repr__(self) -> str:
        return f"Session({self.name!r})"

    get = blocking(session.Session.get)
    append = blocking(session.Session.append)
    generate = _generating(session.Session.generate)
    cancel_generation = blocking(session.Session.cancel_generation)
    tokens = _reading(session.Session.tokens)
    fork = _forking(session.Session.fork)
    rewind = blocking(session.Session.rewind)
    pause = blocking(session.Session.pause)
    resume = blocking(session.Session.resume)
    checkpoint = blocking(session.Session.checkpoint)
    update = blocking(session.Session.update)
    delete = blocking(session.Session.delete)
    undelete = blocking(session.Session.undelete)
    migrate = telling(session.Session.migrate)
    release_quarantine = blocking(session.Session.release_quarantine)
    export = iterating(session.Session.export)


class Sessions(Twin[session.Sessions]):
    """All sessions of the service."""

    def open(self, name: str) -> Session:
        """The session of that name, unread."""
        return Session(self._hold, self._inner.open(name))

    create = _opening(session.Sessions.create)
    list = iterating(session.Sessions.list)

    def import_(
        self,
        workflow: str,
        chunks: Iterable[export_pb2.ExportChunk],
        session_id: str = "",
        *,
        request_id: str | None = None,
    ) -> Session:
        """A new session from the chunks of an export, such as client/frames.py reads from a file."""
        work = self._inner.import_(workflow, _each(chunks), session_id, request_id=request_id)
        return Session(self._hold, self._hold.run(work))


async def _each(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, taken in threads: taking one may wait, even for the loop."""
    iterator = iter(items)
    while (item := await asyncio.to_thread(next, iterator, _END)) is not _END:
        yield item  # type: ignore[misc]  # no item is _END
