"""What an acknowledgement of a Redis server survives, read from the server itself; and servers that are no use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import ResponseError

from forkpoint.errors import ConfigError, DurabilityNotReachedError, StoreUnavailableError
from forkpoint.statestore.records import Durability
from forkpoint.statestore.redis.connection import Confirmation
from forkpoint.statestore.redis.pack import Command
from forkpoint.statestore.redis.server import Reply, exchange_on
from forkpoint.statestore.redis.url import RedisUrl

QUESTIONS: Final[Sequence[Command]] = (("INFO",), ("CONFIG", "GET", "appendfsync", "no-appendfsync-on-rewrite"))
REDIS_LEAST: Final = (7, 0)
"""Functions."""
VALKEY_LEAST: Final = (8, 0)
WAITAOF_LEAST: Final = (7, 2)
RANKS: Final = {Durability.MEMORY: 0, Durability.LOCAL_FSYNC: 1, Durability.REPLICATED: 2}


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself."""

    product: str
    """redis or valkey."""
    version: tuple[int, ...]
    role: str
    append_only: bool
    appendfsync: str | None
    """None: it hides its CONFIG."""
    sync_pauses: bool
    """no-appendfsync-on-rewrite: nothing is synced while a child process rewrites a file."""
    policy: str
    """maxmemory-policy; "" when it doesn't say."""


def parse_facts(info: Reply, config: Reply) -> ServerFacts:
    """From the replies to QUESTIONS."""
    lines = bytes(info).decode(errors="replace").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))
    product = fields.get("server_name", "redis")
    version = fields.get("valkey_version") or fields.get("redis_version", "0")
    settings: dict[bytes, bytes] = {}
    if not isinstance(config, BaseException):
        settings = dict(zip(config[::2], config[1::2], strict=True))
    appendfsync = settings.get(b"appendfsync")
    return ServerFacts(
        product,
        tuple(int(part) for part in version.split(".") if part.isdigit()),
        fields.get("role", "").strip(),
        fields.get("aof_enabled", "0").strip() == "1",
        None if appendfsync is None else appendfsync.decode(),
        settings.get(b"no-appendfsync-on-rewrite") == b"yes",
        fields.get("maxmemory_policy", "").strip(),
    )


class DurabilityGate:
    """Greets every new connection: the server behind it may be another one than before, with other settings.

    Refuses a version too old, an evicting server, and one that reaches less than was asked for, or than the store
    reached when it was opened.
    """

    def __init__(self, key: str, url: RedisUrl) -> None:
        """`key`: the setting that holds the URL."""
        self._key = key
        self._url = url
        self.reached: Durability | None = None
        """The least of all servers that were met; None before the first."""
        self.reason = ""
        """Why no more is reached."""
        self._fixed = False

    async def greet(self, connection: Any) -> None:
        """Raises ConfigError and DurabilityNotReachedError, which are StoreUnavailableError once the store is open;
        StoreUnavailableError of a replica; redis-py's errors."""
        info, config = await exchange_on(connection, QUESTIONS)
        if isinstance(info, ResponseError):
            raise info
        try:
            self.admit(parse_facts(info, config))
        except (ConfigError, DurabilityNotReachedError) as error:
            if self._fixed:
                raise StoreUnavailableError(self._url.shown, f"its server is another one now: {error}") from error
            raise

    def admit(self, facts: ServerFacts) -> None:
        """As greet, of what a server said."""
        if facts.role != "master":
            raise StoreUnavailableError(self._url.shown, "it is a replica of another server")
        self._check_version(facts)
        self._check_policy(facts)
        reached, why = self._class_of(facts)
        asked = self.reached if self._fixed else self._url.durability
        if asked is not None and RANKS[reached] < RANKS[asked]:
            raise DurabilityNotReachedError(asked.value.lower(), f"{reached.value.lower()} ({self._url.shown}: {why})")
        if not self._fixed and (self.reached is None or RANKS[reached] < RANKS[self.reached]):
            self.reached, self.reason = reached, why

    def fix(self) -> Durability:
        """The store is open: from now on no server may reach less. Returns the class."""
        assert self.reached is not None
        self._fixed = True
        return self.reached

    def confirmation(self) -> Confirmation | None:
        """What must follow every call."""
        url = self._url
        seconds = url.wait_ms / 1000
        if url.waitaof:
            return Confirmation(("WAITAOF", 1, url.waitaof, url.wait_ms), seconds)
        return Confirmation(("WAIT", url.wait, url.wait_ms), seconds) if url.wait else None

    def _check_version(self, facts: ServerFacts) -> None:
        least: Mapping[str, tuple[int, ...]] = {"valkey": VALKEY_LEAST}
        needed = least.get(facts.product, REDIS_LEAST)
        shown = f"{facts.product} {'.'.join(map(str, facts.version))}"
        if facts.version < needed:
            raise ConfigError(self._key, self._url.shown, f"{shown} is too old: {'.'.join(map(str, needed))} is needed")
        if self._url.waitaof and facts.product != "valkey" and facts.version < WAITAOF_LEAST:
            raise ConfigError(self._key, self._url.shown, f"waitaof needs Redis 7.2 or Valkey, this is {shown}")

    def _check_policy(self, facts: ServerFacts) -> None:
        if facts.policy != "noeviction":
            raise ConfigError(
                self._key,
                self._url.shown,
                f"maxmemory-policy is {facts.policy or 'hidden'!r}: a server that evicts keys would silently lose"
                " sessions; set it to noeviction",
            )

    def _class_of(self, facts: ServerFacts) -> tuple[Durability, str]:
        url = self._url
        if url.wait or url.waitaof:
            return Durability.REPLICATED, "replicas confirm every write"
        if not facts.append_only:
            return Durability.MEMORY, "appendonly is no"
        fsync = facts.appendfsync or url.appendfsync
        if fsync is None:
            return Durability.MEMORY, "it hides CONFIG: say appendfsync=always in the URL if that is how it is set"
        if fsync != "always":
            return Durability.MEMORY, f"appendfsync is {fsync}"
        if facts.sync_pauses:
            return Durability.MEMORY, "no-appendfsync-on-rewrite is yes"
        return Durability.LOCAL_FSYNC, "appendonly is yes and appendfsync is always"
