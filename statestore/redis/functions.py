"""Calls of the library's functions: loaded where they are missing, confirmed by replicas where that was asked for."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import ResponseError

from forkpoint.clock import Clock
from forkpoint.errors import RequestIdReusedError
from forkpoint.statestore.records import RequestKey
from forkpoint.statestore.redis.connection import Call, Confirmation, RedisConnection
from forkpoint.statestore.redis.failures import failure, function_is_missing
from forkpoint.statestore.redis.lualib import prefix, source
from forkpoint.statestore.redis.pack import Command
from forkpoint.statestore.redis.server import Reply

Argument = bytes | str | int
LOADS_MAX: Final = 3
"""Times that a missing library is loaded within one call: it may be lost again by a failover."""


class Refusal(Exception):
    """A function did nothing, and says why. Turned into one of our errors by whoever called it."""

    def __init__(self, status: str, details: Sequence[Any]) -> None:
        super().__init__(status, *details)
        self.status, self.details = status, list(details)

    def text(self, index: int) -> str:
        """A detail that is text."""
        return bytes(self.details[index]).decode()

    def number(self, index: int) -> int:
        """A detail that is a number."""
        return int(self.details[index])


@dataclass(frozen=True, slots=True)
class Answer:
    """What a writing function answered, now or earlier: `call` names the function that gave it."""

    call: str
    value: Any
    replayed: bool


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One call of a function; all keys that it touches begin with `base`."""

    base: str
    name: str
    arguments: tuple[Argument, ...]
    writes: bool

    def as_call(self) -> Call:
        """The command. A second key is named that never exists, as the first never does: while their slot moves
        to another server no function runs, since one that broke off there would leave half of its work."""
        verb = "FCALL" if self.writes else "FCALL_RO"
        return Call(self.base, (verb, f"{prefix()}_{self.name}", 2, self.base, f"{self.base}:", *self.arguments))


class Functions:
    """Runs functions on a connection."""

    def __init__(self, connection: RedisConnection, clock: Clock) -> None:
        self.connection = connection
        self.confirm: Confirmation | None = None
        """What must follow every call."""
        self._clock = clock

    async def load_everywhere(self) -> None:
        """Load the library when a server lacks it: replicas and files get a copy each time."""
        if not all(await self.connection.each_primary("FUNCTION", "LIST", "LIBRARYNAME", prefix())):
            await self.connection.each_primary("FUNCTION", "LOAD", "REPLACE", source())

    async def read(self, base: str, name: str, *arguments: Argument) -> Reply:
        """Call a function that writes nothing. Raises StoreUnavailableError."""
        (reply,) = await self.read_many([(base, name, arguments)])
        return reply

    async def ask(self, base: str, name: str, *arguments: Argument) -> list[Any]:
        """As read, of a function that may refuse: what follows its OK. Raises Refusal."""
        return accepted(await self.read(base, name, *arguments))

    async def read_many(self, calls: Sequence[tuple[str, str, tuple[Argument, ...]]]) -> list[Reply]:
        """As read, many at once. Raises the first error of any."""
        replies = await self.run([FunctionCall(*call, writes=False) for call in calls])
        for reply in replies:
            if isinstance(reply, BaseException):
                raise self.error(reply) from reply
        return replies

    async def write(self, base: str, name: str, request: RequestKey | None, *arguments: Argument) -> Answer:
        """Call a function that writes. Raises Refusal, RequestIdReusedError, StoreUnavailableError, StoreFullError."""
        given = (self.now_us(), *request_arguments(request), *arguments)
        (reply,) = await self.run([FunctionCall(base, name, given, writes=True)])
        if isinstance(reply, BaseException):
            raise self.error(reply) from reply
        status = bytes(reply[0]).decode()
        if status == "OK":
            return Answer(name, reply[1], False)
        if status == "REPLAYED":
            return Answer(bytes(reply[1]).decode(), reply[2], True)
        if status == "REUSED":
            raise RequestIdReusedError("" if request is None else request.request_id)
        raise Refusal(status, reply[1:])

    async def look(self, base: str, *command: bytes | str | int) -> Reply:
        """Read with a plain command. Raises StoreUnavailableError."""
        (reply,) = await self.look_many([(base, command)])
        return reply

    async def look_many(self, commands: Sequence[tuple[str, Command]]) -> list[Reply]:
        """As look, many at once. Raises the first error of any."""
        replies = await self.connection.pipeline([Call(*command) for command in commands], self.confirm)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise self.error(reply) from reply
        return replies

    async def run(self, calls: Sequence[FunctionCall]) -> list[Reply]:
        """Call many functions in pipelines; errors are values. Loads the library where it is missing."""
        replies: list[Reply] = [None] * len(calls)
        waiting = list(range(len(calls)))
        for _ in range(LOADS_MAX):
            got = await self.connection.pipeline([calls[index].as_call() for index in waiting], self.confirm)
            for index, reply in zip(waiting, got, strict=True):
                replies[index] = reply
            waiting = [index for index in waiting if function_is_missing(replies[index])]
            if not waiting:
                break
            await self._load({calls[index].base for index in waiting})
        return replies

    def now_us(self) -> int:
        """The caller's time: the server's decides nothing."""
        return self._clock.wall_us()

    def error(self, reply: BaseException) -> Exception:
        """An error reply in our words."""
        return failure(self.connection.shown, reply)

    async def _load(self, bases: set[str]) -> None:
        load = ("FUNCTION", "LOAD", "REPLACE", source())
        replies = await asyncio.gather(*(self.connection.pipeline([Call(base, load)]) for base in bases))
        for (reply,) in replies:
            if isinstance(reply, ResponseError):
                raise self.error(reply) from reply


def accepted(reply: Reply) -> list[Any]:
    """What follows the OK of a reply. Raises Refusal."""
    status = bytes(reply[0]).decode()
    if status != "OK":
        raise Refusal(status, reply[1:])
    return list(reply[1:])


def request_arguments(request: RequestKey | None) -> tuple[Argument, Argument]:
    """A request's name within its workflow, and its digest; both empty for none."""
    if request is None:
        return "", ""
    return f"{len(request.caller)}:{request.caller}:{request.request_id}", request.digest
