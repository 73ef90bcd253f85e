"""Redis URLs: where the servers are, how to reach them, and what is expected of them.

redis://[user[:password]@]host[:port][,host[:port]…][/db][?option=value&…]
redis+sentinel://[user[:password]@]host[:port][,host[:port]…]/service[/db][?…]

`rediss` and `rediss+sentinel` are the same over TLS; `valkey`, `valkeys` and their `+sentinel` forms mean the same
again. A cluster is recognised by itself: its hosts are those asked first. Options are the fields of RedisUrl below.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from forkpoint.errors import ConfigError
from forkpoint.statestore.records import Durability

PORT: Final = 6379
SENTINEL_PORT: Final = 26379
SCHEMES: Final = tuple(
    f"{name}{tls}{sentinel}" for name in ("redis", "valkey") for tls in ("", "s") for sentinel in ("", "+sentinel")
)
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Files are PEM; the server's certificate is always verified."""

    ca: str | None = None
    """Authorities to trust; None: the system's."""
    cert: str | None = None
    key: str | None = None
    check_hostname: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUrl:
    """A parsed URL. Everything from `sentinel_username` on is an option of that name."""

    shown: str
    """Scheme, hosts and path: what errors and logs may print. Holds no password."""
    hosts: tuple[tuple[str, int], ...]
    service: str | None = None
    """Name of the primary that Sentinels are asked for; None: `hosts` are servers."""
    db: int = 0
    username: str | None = None
    password: str | None = None
    tls: TlsOptions | None = None
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    """What the Sentinels ask for; user and password of the URL are the servers'."""
    namespace: str = "default"
    """For tools that open a store without a marker of their own."""
    durability: Durability | None = None
    """The class that the store must reach; None: whatever it reaches."""
    wait: int = 0
    """Replicas that must hold a write in memory before it is acknowledged (WAIT)."""
    waitaof: int = 0
    """Replicas that must have a write on disk, as the primary must (WAITAOF, Redis 7.2 and Valkey)."""
    wait_ms: int = 1000
    """How long replicas may take for that."""
    appendfsync: str | None = None
    """The operator's word for what a server that hides CONFIG is set to."""
    timeout: float = 5.0
    """Seconds for an answer."""
    connect_timeout: float = 2.0
    """Seconds for a connection."""
    connections: int = 8
    """Connections to each server at most."""


def parse_redis_url(key: str, url: str) -> RedisUrl:
    """Parse the value of setting `key`. Raises ConfigError, which never shows the password."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(key, url.partition(":")[0] + "://", str(error)) from error
    userinfo, _, netloc = parts.netloc.rpartition("@")
    sentinel = parts.scheme.endswith("+sentinel")
    shown = f"{parts.scheme}://{netloc}{parts.path}"
    if parts.scheme not in SCHEMES:
        raise ConfigError(key, shown, f"no Redis URL: use {', '.join(SCHEMES)}")
    if parts.fragment:
        raise ConfigError(key, shown, "has a fragment: write # as %23")
    hosts = tuple(_host(key, shown, text, SENTINEL_PORT if sentinel else PORT) for text in netloc.split(","))
    path = [unquote(part) for part in parts.path.split("/")[1:] if part]
    service = None
    if sentinel:
        if not path:
            raise ConfigError(key, shown, "names no service: expected redis+sentinel://host,host/service")
        service = path.pop(0)
    if len(path) > 1:
        raise ConfigError(key, shown, f"has {len(path)} parts where one database number is expected")
    username, _, password = userinfo.partition(":")
    options = _Options(key, shown, dict(parse_qsl(parts.query, keep_blank_values=True)))
    secure = parts.scheme.removesuffix("+sentinel") in ("rediss", "valkeys")
    parsed = RedisUrl(
        shown=shown,
        hosts=hosts,
        service=service,
        db=_number(key, shown, "the database", path[0], 0, 1 << 20) if path else 0,
        username=unquote(username) or None,
        password=unquote(password) or None,
        tls=options.tls() if secure else None,
        sentinel_username=options.text("sentinel_username") if sentinel else None,
        sentinel_password=options.text("sentinel_password") if sentinel else None,
        namespace=options.text("namespace") or "default",
        durability=options.durability(),
        wait=options.number("wait", 0, 0, 64),
        waitaof=options.number("waitaof", 0, 0, 64),
        wait_ms=options.number("wait_ms", 1000, 1, 600_000),
        appendfsync=options.one_of("appendfsync", ("always", "everysec", "no")),
        timeout=options.seconds("timeout", 5.0),
        connect_timeout=options.seconds("connect_timeout", 2.0),
        connections=options.number("connections", 8, 1, 1024),
    )
    options.refuse_others()
    if parsed.durability is Durability.REPLICATED and not (parsed.wait or parsed.waitaof):
        raise ConfigError(key, shown, "durability replicated needs wait=N or waitaof=N, the replicas to wait for")
    return parsed


def _host(key: str, shown: str, text: str, default_port: int) -> tuple[str, int]:
    host, port = text, ""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        if rest and not rest.startswith(":"):
            raise ConfigError(key, shown, f"{text!r} is no host:port")
        port = rest[1:]
    elif ":" in text:
        host, _, port = text.partition(":")
    if not host:
        raise ConfigError(key, shown, "names no host")
    return unquote(host), _number(key, shown, "the port", port, 1, 65_535) if port else default_port


def _number(key: str, shown: str, what: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
        raise ConfigError(key, shown, f"{what} is {text!r}, expected a number in {least} … {most}")
    return int(text)


class _Options:
    """The query of a URL; every option is taken once, and what is left over is refused."""

    def __init__(self, key: str, shown: str, values: Mapping[str, str]) -> None:
        self._key, self._shown = key, shown
        self._values = dict(values)

    def text(self, name: str) -> str | None:
        return self._values.pop(name, None)

    def number(self, name: str, default: int, least: int, most: int) -> int:
        text = self.text(name)
        return default if text is None else _number(self._key, self._shown, name, text, least, most)

    def seconds(self, name: str, default: float) -> float:
        text = self.text(name)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0.001 <= value <= 3600:
            raise self._wrong(name, text, "seconds in 0.001 … 3600")
        return value

    def one_of(self, name: str, known: tuple[str, ...]) -> str | None:
        text = self.text(name)
        if text is not None and text not in known:
            raise self._wrong(name, text, f"one of {', '.join(known)}")
        return text

    def durability(self) -> Durability | None:
        text, known = self.text("durability"), [durability.value for durability in Durability]
        if text is not None and text.upper() not in known:
            raise self._wrong("durability", text, f"one of {', '.join(known).lower()}")
        return None if text is None else Durability[text.upper()]

    def tls(self) -> TlsOptions:
        text = self.text("check_hostname")
        if text is not None and text.lower() not in _TRUE | _FALSE:
            raise self._wrong("check_hostname", text, "true or false")
        return TlsOptions(self.text("ca"), self.text("cert"), self.text("key"), text is None or text.lower() in _TRUE)

    def refuse_others(self) -> None:
        for name in self._values:
            raise ConfigError(self._key, self._shown, f"no option {name!r} in this URL")

    def _wrong(self, name: str, text: str, expected: str) -> ConfigError:
        return ConfigError(self._key, self._shown, f"{name} is {text!r}, expected {expected}")
