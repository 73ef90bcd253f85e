"""Blob stores by setting: one URL, or several of them in order, the fastest tier first, with white space between.

host://2GiB                 this process's memory, a cache
memory://                   memory too, for tests: what is put stays while the process lives
file:///absolute/path       files; ?shared=true when other machines mount the folder too
redis://host …              Redis or Valkey, as statestore/redis/url.py reads it

Every URL may have ?tier=cache or ?tier=durable (host:// is a cache, the others are durable when they don't say),
?tries= (calls in all when the store can't be reached: 4 for Redis, else 1) and ?parallel= (calls at once: no limit but
the backend's own). A blob is stored once it is in every durable tier.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from forkpoint.clock import Clock
from forkpoint.errors import ConfigError
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.lru import HostMemoryBlobs
from forkpoint.statestore.redis.url import SCHEMES, parse_redis_url
from forkpoint.statestore.tiers import BlobSource, Role, Tier, TieredBlobs
from forkpoint.statestore.wrappers.limit import LimitedBlobs
from forkpoint.statestore.wrappers.retry import Backoff, RetryingBlobs

T = TypeVar("T")

KEY: Final = "blobs"
DEFAULT_NAMESPACE: Final = "default"
REDIS_TRIES: Final = 4
TRIES_MAX: Final = 100
PARALLEL_MAX: Final = 1024
PATH_EXPECTED: Final = "expected file:///absolute/path (white space in it as %20)"
UNITS: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SIZE: Final = re.compile(r"(?P<number>[0-9]{1,15})(?P<unit>[A-Za-z]*)\Z")
_SWITCH: Final = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class BlobUrl:
    """One URL of the setting, its own options taken out."""

    url: str
    """What is left for the backend. May hold a password."""
    shown: str
    """What errors may print."""
    scheme: str
    role: Role
    tries: int
    parallel: int
    """0: no limit."""
    shared: bool

    @property
    def folder(self) -> Path | None:
        """Where files lie; None for other backends."""
        return Path(unquote(urlsplit(self.url).path)) if self.scheme == "file" else None


def parse_blobs(setting: str) -> list[BlobUrl]:
    """The URLs of a setting, checked as far as that needs no store. Raises ConfigError."""
    urls = [_parse(text) for text in setting.split()]
    if not urls:
        raise ConfigError(KEY, repr(setting), "names no store: use file:///path, redis://host or memory://")
    if all(url.role is Role.CACHE for url in urls):
        raise ConfigError(KEY, urls[0].shown, "is a cache: a durable tier must follow, such as file:///path")
    return urls


def open_stack(
    setting: str,
    sources: Sequence[BlobSource] = (),
    clock: Clock | None = None,
    namespace: str = DEFAULT_NAMESPACE,
) -> BlobStore:
    """The blob store of a setting, folders made when missing; `await blobs.open()` comes next. `sources` are asked
    after all tiers. `namespace`: the catalog's. What no manifest of a catalog names is garbage to it, so no two
    catalogs may share a place; on one Redis their namespaces keep them apart. Raises ConfigError,
    StoreUnavailableError."""
    urls = parse_blobs(setting)
    if len(urls) == 1 and not sources:
        return _open(urls[0], namespace)
    labels = list[str]()
    for url in urls:
        same = sum(label.partition("-")[0] == url.scheme for label in labels)
        labels.append(f"{url.scheme}-{same + 1}" if same else url.scheme)
    tiers = [Tier(label, _open(url, namespace), url.role) for label, url in zip(labels, urls, strict=True)]
    return TieredBlobs(tiers, sources, clock)


def _parse(text: str) -> BlobUrl:
    parts = urlsplit(text)
    shown = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    if parts.scheme not in ("host", "memory", "file", *SCHEMES):
        raise ConfigError(KEY, shown, "no such blob store: use file:///path, redis://host, host://2GiB or memory://")
    options = _Options(shown, dict(parse_qsl(parts.query, keep_blank_values=True)))
    is_redis, is_host = parts.scheme in SCHEMES, parts.scheme == "host"
    role = options.word("tier", {role.value: role for role in Role}, Role.CACHE if is_host else Role.DURABLE)
    if is_host and role is not Role.CACHE:
        raise ConfigError(
            KEY, shown, "tier: host memory may forget and can only be a cache; memory:// keeps what it has"
        )
    tries = options.number("tries", REDIS_TRIES if is_redis else 1, 1, TRIES_MAX)
    parallel = options.number("parallel", 0, 0, PARALLEL_MAX)
    shared = parts.scheme == "file" and options.word("shared", _SWITCH, False)
    if not is_redis:
        options.refuse_others()
    if parts.scheme == "file" and not parts.path.startswith("/"):
        raise ConfigError(KEY, shown, PATH_EXPECTED)
    url = urlunsplit((parts.scheme, parts.netloc, parts.path, urlencode(options.left), parts.fragment))
    parsed = BlobUrl(url, shown, parts.scheme, role, tries, parallel, shared)
    if is_redis:
        parse_redis_url(KEY, url)
    elif is_host:
        _bytes(parsed)
    elif parts.scheme == "file":
        _path(parsed)
    elif parts.netloc or parts.path or parts.fragment:
        raise ConfigError(KEY, shown, "expected memory:// and nothing behind it")
    return parsed


def _open(url: BlobUrl, namespace: str) -> BlobStore:
    blobs = _backend(url, namespace)
    if url.parallel:
        blobs = LimitedBlobs(blobs, calls_max=url.parallel)
    return RetryingBlobs(blobs, Backoff(tries=url.tries)) if url.tries > 1 else blobs


def _backend(url: BlobUrl, namespace: str) -> BlobStore:
    if url.scheme == "host":
        return HostMemoryBlobs(_bytes(url))
    if url.scheme == "memory":
        return MemoryBlobs()
    if url.scheme == "file":
        return FileBlobs(_path(url), survives_node=url.shared)
    # Late: redis-py takes longer to import than all the rest, and most commands never need it.
    from forkpoint.statestore.redis.blobs import RedisBlobs

    parsed = parse_redis_url(KEY, url.url)
    if "namespace" not in dict(parse_qsl(urlsplit(url.url).query)):
        parsed = replace(parsed, namespace=namespace)
    return RedisBlobs(parsed, url.role is Role.CACHE)


def _path(url: BlobUrl) -> Path:
    parts = urlsplit(url.url)
    path = url.folder
    if parts.netloc or parts.fragment or path is None or not path.is_absolute() or path == Path("/"):
        raise ConfigError(KEY, url.shown, PATH_EXPECTED)
    return path


def _bytes(url: BlobUrl) -> int:
    """`2GiB` as a number."""
    parts = urlsplit(url.url)
    size = SIZE.match(parts.netloc)
    if parts.path or parts.fragment or size is None or size["unit"] not in UNITS or not int(size["number"]):
        raise ConfigError(KEY, url.shown, f"expected host://SIZE, a number and one of {', '.join(filter(None, UNITS))}")
    return int(size["number"]) * UNITS[size["unit"]]


class _Options:
    """The options of a URL; each is taken once."""

    def __init__(self, shown: str, left: Mapping[str, str]) -> None:
        self._shown = shown
        self.left = dict(left)

    def number(self, name: str, default: int, least: int, most: int) -> int:
        text = self.left.pop(name, None)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
            raise ConfigError(KEY, self._shown, f"{name} is {text!r}, expected a number in {least} … {most}")
        return int(text)

    def word(self, name: str, known: Mapping[str, T], default: T) -> T:
        text = self.left.pop(name, None)
        if text is None:
            return default
        if text not in known:
            raise ConfigError(KEY, self._shown, f"{name} is {text!r}, expected one of {', '.join(known)}")
        return known[text]

    def refuse_others(self) -> None:
        for name in self.left:
            raise ConfigError(KEY, self._shown, f"no option {name!r} in this URL")
