"""A connection to a store on Redis: finds the server of every key, sends in pipelines, and never repeats a command that
may have happened.

redis-py's own cluster client is not used: it sends a command again after a lost answer, and it can't keep a WAIT on the
connection of the write that it is to confirm.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from redis.exceptions import AskError, MovedError, ResponseError, TryAgainError

from forkpoint.errors import StoreUnavailableError
from forkpoint.statestore.redis.failures import failure
from forkpoint.statestore.redis.pack import Command
from forkpoint.statestore.redis.server import Greeting, RedisServer, Reply
from forkpoint.statestore.redis.slots import SlotMap, slot_of
from forkpoint.statestore.redis.url import RedisUrl

REDIRECTS_MAX: Final = 8
"""Times that one command may be sent elsewhere while slots move."""
SCAN_COUNT: Final = 1000
"""Keys that a server looks at in one step of a scan: about a quarter of a millisecond."""
MARK_MS: Final = 365 * 24 * 3600 * 1000
"""How long the key stays that confirmations write to."""
TRY_AGAIN_SECONDS: Final = 0.05
"""Pause before a command whose keys are just moving is sent again; doubled each time."""


@dataclass(frozen=True, slots=True)
class Call:
    """One command and the key that decides where it goes. All keys of it lie in that key's slot."""

    key: str
    command: Command


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What must follow a call on its connection before it counts: also a read, since a primary shows what its replicas
    may not have yet, and a write that found its answer stored by an earlier one."""

    command: Command
    """WAIT or WAITAOF."""
    seconds: float
    """How long it may block."""

    @staticmethod
    def mark(key: str) -> list[Command]:
        """Commands that write something of their own. WAIT counts what its own connection wrote; this comes after
        everything that was seen before. The second one works also when memory is full."""
        return [("SET", key, "", "NX"), ("PEXPIRE", key, MARK_MS)]

    def problem(self, reply: Reply) -> str | None:
        """Why the reply is too little; None when it is enough."""
        if isinstance(reply, BaseException):
            return str(reply)
        if self.command[0] == "WAIT":
            asked, got = int(self.command[1]), int(reply)
            return None if got >= asked else f"{got} of {asked} replicas have it"
        local, replicas = (int(count) for count in reply)
        if local < int(self.command[1]):
            return "the primary has not synced it"
        asked = int(self.command[2])
        return None if replicas >= asked else f"{replicas} of {asked} replicas have it on disk"


class RedisConnection:
    """Servers of one URL. For one event loop."""

    def __init__(self, url: RedisUrl, greet: Greeting | None = None) -> None:
        """`greet` runs on every new connection to a server, before anything else."""
        self.url = url
        self._greet = greet
        self._servers: dict[tuple[str, int], RedisServer] = {}
        self._slots: SlotMap | None = None
        self._stale = False
        self._seed: RedisServer | None = None
        self._closed = False

    @property
    def shown(self) -> str:
        """The store's name in errors."""
        return self.url.shown

    @property
    def is_cluster(self) -> bool:
        """Whether the servers are a Redis Cluster. Known once open."""
        return self._slots is not None

    async def open(self) -> None:
        """Find the servers. Raises StoreUnavailableError."""
        error: StoreUnavailableError | None = None
        for host, port in self.url.hosts[:1] if self.url.service else self.url.hosts:
            server = self._server_at((host, port))
            try:
                (info,) = await server.exchange([("INFO", "cluster")])
                if isinstance(info, ResponseError):
                    raise failure(self.shown, info)
                self._seed = server
                if b"cluster_enabled:1" in info:
                    await self._learn(server)
                return
            except StoreUnavailableError as failed:
                error = failed
        assert error is not None
        raise error

    async def call(self, key: str, *command: bytes | str | int | float) -> Reply:
        """Send one command and return its reply. Raises StoreUnavailableError, StoreFullError."""
        (reply,) = await self.pipeline([Call(key, command)])
        if isinstance(reply, BaseException):
            raise failure(self.shown, reply) from reply
        return reply

    async def pipeline(self, calls: Sequence[Call], confirm: Confirmation | None = None) -> list[Reply]:
        """Send commands, those of one server together and in order; returns a reply each. What went wrong with one
        of them is its reply: a ResponseError of its own, or the StoreUnavailableError of its server, after which it
        may have happened. With `confirm`, a write whose confirmation falls short is a StoreUnavailableError too."""
        replies: list[Reply] = [None] * len(calls)
        waiting = list(range(len(calls)))
        pause = TRY_AGAIN_SECONDS
        for _ in range(REDIRECTS_MAX):
            if self._stale:
                await self._relearn()
            groups: dict[tuple[str, int], list[int]] = defaultdict(list)
            for index in waiting:
                groups[self._address_of(calls[index].key)].append(index)
            await asyncio.gather(
                *(self._send_group(address, calls, part, replies, confirm) for address, part in groups.items())
            )
            waiting = [index for index in waiting if isinstance(replies[index], MovedError | TryAgainError)]
            if not waiting:
                return replies
            if any(isinstance(replies[index], TryAgainError) for index in waiting):
                await asyncio.sleep(pause)
                pause *= 2
        return replies

    async def each_primary(self, *command: bytes | str | int | float) -> list[Reply]:
        """Send one command to every server that takes writes. Raises StoreUnavailableError, StoreFullError."""
        servers = [self._open_seed()]
        if self._slots is not None:
            servers = [self._server_at(address) for address in self._slots.primaries()]
        replies = [(await server.exchange([command]))[0] for server in servers]
        for reply in replies:
            if isinstance(reply, BaseException):
                raise failure(self.shown, reply) from reply
        return replies

    async def scan(self, pattern: str) -> AsyncIterator[list[str]]:
        """Names of keys that match, of every server that takes writes, a few at a time; some may come twice, and what
        comes or goes meanwhile may or may not be among them. Raises StoreUnavailableError."""
        seed = self._open_seed()
        servers = [seed] if self._slots is None else [self._server_at(found) for found in self._slots.primaries()]
        for server in servers:
            cursor = b"0"
            while True:
                (reply,) = await server.exchange([("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)])
                if isinstance(reply, BaseException):
                    raise failure(self.shown, reply) from reply
                cursor = reply[0]
                yield [bytes(key).decode(errors="replace") for key in reply[1]]
                if cursor == b"0":
                    break

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        self._closed = True
        servers = list(self._servers.values())
        self._servers.clear()
        for server in servers:
            await server.close()

    # --- where a key lies --------------------------------------------------------------------------------------
    def _open_seed(self) -> RedisServer:
        if self._closed or self._seed is None:
            raise StoreUnavailableError(self.shown, "it is closed" if self._closed else "it is not open")
        return self._seed

    def _server_at(self, address: tuple[str, int]) -> RedisServer:
        if self._closed:
            raise StoreUnavailableError(self.shown, "it is closed")
        if address not in self._servers:
            self._servers[address] = RedisServer(self.url, *address, greet=self._greet)
        return self._servers[address]

    def _address_of(self, key: str) -> tuple[str, int]:
        seed = self._open_seed()
        if self._slots is None:
            return seed.address
        address = self._slots.primary(slot_of(key))
        if address is None:
            self._stale = True
            raise StoreUnavailableError(self.shown, f"no server has slot {slot_of(key)}")
        return address

    async def _learn(self, server: RedisServer) -> None:
        (reply,) = await server.exchange([("CLUSTER", "SLOTS")])
        if isinstance(reply, BaseException):
            raise failure(self.shown, reply) from reply
        self._slots = SlotMap(reply, server.address)
        self._stale = False

    async def _relearn(self) -> None:
        """Ask the servers in turn where the slots are now; keeps the old map when none answers."""
        known = [*self._servers, *(host for host in self.url.hosts if host not in self._servers)]
        for address in known:
            try:
                await self._learn(self._server_at(address))
            except StoreUnavailableError:
                if self._closed:
                    raise
            else:
                return

    # --- one server's part -------------------------------------------------------------------------------------
    async def _send_group(
        self,
        address: tuple[str, int],
        calls: Sequence[Call],
        part: Sequence[int],
        replies: list[Reply],
        confirm: Confirmation | None,
    ) -> None:
        """Send the calls numbered in `part` to one server and fill in their replies."""
        try:
            got = await self._exchange(address, [calls[index] for index in part], confirm)
        except StoreUnavailableError as error:
            self._stale = self._slots is not None
            got = [error] * len(part)
        for index, reply in zip(part, got, strict=True):
            replies[index] = reply
            if isinstance(reply, MovedError):
                self._note_move(reply)
            elif isinstance(reply, AskError):
                replies[index] = await self._ask(reply, calls[index], confirm)

    async def _exchange(
        self, address: tuple[str, int], calls: Sequence[Call], confirm: Confirmation | None
    ) -> list[Reply]:
        server, commands = self._server_at(address), [call.command for call in calls]
        if confirm is None:
            return await server.exchange(commands)
        commands += [*confirm.mark(f"{calls[0].key}:confirm"), confirm.command]
        *replies, marked, confirmed = await server.exchange(commands, confirm.seconds)
        problem = confirm.problem(confirmed) if marked == 1 else "nothing could be written to wait for"
        replies = replies[: len(calls)]
        if problem is None:
            return replies
        short = StoreUnavailableError(self.shown, f"done, but {problem} after {confirm.seconds} s; it may be lost")
        return [reply if isinstance(reply, BaseException) else short for reply in replies]

    async def _ask(self, error: AskError, call: Call, confirm: Confirmation | None) -> Reply:
        """The key is just moving: its new server takes this one command."""
        try:
            target = (str(error.host), int(error.port))
            return (await self._exchange(target, [Call(call.key, ("ASKING",)), call], confirm))[1]
        except StoreUnavailableError as unavailable:
            return unavailable

    def _note_move(self, error: MovedError) -> None:
        self._stale = True
        if self._slots is not None:
            self._slots.move(int(error.slot_id), (str(error.host), int(error.port)))
