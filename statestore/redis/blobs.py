"""RedisBlobs: a blob is chunks of 1 MiB, and a header that names them and makes it exist.

Chunks are sent first, under a name that is fresh for every upload, and expire by themselves; then one script on the
server sees that all are there, stops their expiry and sets the header, in one step. Who replaces or deletes takes the
header first and the chunks after it. So a crash leaves chunks that no header names, never a blob that lacks some.
"""

import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from forkpoint.errors import BlobDamagedError, BlobMissingError, ConfigError, StoreUnavailableError
from forkpoint.statestore.blobs import Buffer, size_of
from forkpoint.statestore.errors import StaleCollectorError
from forkpoint.statestore.findings import Finding, Severity
from forkpoint.statestore.records import Durability
from forkpoint.statestore.redis import blobscripts
from forkpoint.statestore.redis.blobcheck import orphan_chunks
from forkpoint.statestore.redis.blobheader import (
    CHUNK_BYTES,
    FRAME_BYTES_MAX,
    GROUPS,
    BlobHeader,
    BlobKeys,
    digest_of_key,
    upload_of_key,
)
from forkpoint.statestore.redis.chunks import Chunks
from forkpoint.statestore.redis.connection import Call, RedisConnection
from forkpoint.statestore.redis.durability import DurabilityGate, ServerFacts
from forkpoint.statestore.redis.server import Reply
from forkpoint.statestore.redis.url import RedisUrl

log = logging.getLogger(__name__)

DIGEST: Final = re.compile(r"[0-9a-f]{64}\Z")
READS_MAX: Final = 4
"""Times that a frame is read again because it was replaced meanwhile."""
KNOWN_MAX: Final = 65_536
"""Headers known to be confirmed by replicas: about 20 MB."""
BATCH: Final = 256
"""Digests that one pipeline asks about."""


class BlobGate(DurabilityGate):
    """As of a catalog; but an evicting server may be a cache tier."""

    def __init__(self, url: RedisUrl, cache: bool) -> None:
        super().__init__("blobs", url)
        self._cache = cache

    def _check_policy(self, facts: ServerFacts) -> None:
        if facts.policy != "noeviction" and not self._cache:
            raise ConfigError(
                "blobs",
                self._url.shown,
                f"maxmemory-policy is {facts.policy or 'hidden'!r}: a server that evicts keys can be a cache tier"
                " (tier=cache), never a durable one; set it to noeviction",
            )


def _finding(digest: str, keys: Sequence[str]) -> Finding:
    uploads = ", ".join(sorted({upload_of_key(key) for key in keys}))
    return Finding(Severity.WARNING, "ORPHAN_CHUNKS", f"blob {digest}", f"{len(keys)} chunks of upload {uploads}")


class RedisBlobs:
    """See forkpoint.statestore.blobs.BlobStore. `cache`: a cache tier, for which an evicting server is good enough and
    whose class is MEMORY."""

    def __init__(self, url: RedisUrl, cache: bool = False, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._cache = cache
        self._chunk_bytes = chunk_bytes
        self._keys = BlobKeys(url.namespace)
        self._gate = BlobGate(url, cache)
        self._connection = RedisConnection(url, self._gate.greet)
        self._chunks = Chunks(self._connection, url.connections, chunk_bytes)
        self._durability = Durability.MEMORY
        self._tier = ""
        self._confirmed = OrderedDict[str, bytes]()

    # --- the port ----------------------------------------------------------------------------------------------
    @property
    def broken(self) -> str | None:
        return None

    @property
    def durability(self) -> Durability:
        return self._durability

    @property
    def survives_node(self) -> bool:
        return True

    @property
    def tier(self) -> str:
        return self._tier

    async def open(self) -> None:
        if self._tier:
            return
        await self._connection.open()
        reached = self._gate.fix()
        self._durability = Durability.MEMORY if self._cache else reached
        fresh = secrets.token_hex(16)
        (known,) = await self._write([(self._keys.tier, ("SET", self._keys.tier, fresh, "NX", "GET"))])
        self._tier = fresh if known is None else bytes(known).decode()

    async def put(self, digest: str, *pieces: Buffer) -> bool:
        header, is_whole = await self._look(digest)
        if header is not None and is_whole:
            await self._confirm(digest, header)
            return False
        return await self._store(digest, pieces, header or b"")

    async def get(self, digest: str) -> bytes:
        before: bytes | None = None
        for _ in range(READS_MAX):
            value = await self._header(digest)
            if value is None:
                raise BlobMissingError(digest)
            header = BlobHeader.unpack(value)
            if header is None:
                raise BlobDamagedError(digest, "its header in Redis is none")
            if value == before:
                raise BlobDamagedError(digest, f"some of its {header.chunks} chunks are missing or cut")
            before = value
            chunks = await self._chunks.fetch(self._keys.chunks(digest, header))
            whole = [chunk for chunk in chunks if chunk is not None]
            if sum(map(len, whole)) == header.frame_bytes:
                return whole[0] if len(whole) == 1 else b"".join(whole)
        raise StoreUnavailableError(self._connection.shown, f"blob {digest} is being replaced over and over")

    async def has(self, digest: str) -> bool:
        header, is_whole = await self._look(digest)
        if header is None or not is_whole:
            return False
        return await self._confirm(digest, header)

    async def replace(self, digest: str, *pieces: Buffer) -> None:
        self._check(digest)
        await self._store(digest, pieces, None)

    async def delete(self, digests: Sequence[str], term: int = 0) -> None:
        for start in range(0, len(digests), BATCH):
            part = digests[start : start + BATCH]
            calls = []
            for digest in part:
                self._check(digest)
                keys = (self._keys.header(digest), self._keys.fence(digest[:3]))
                calls.append((keys[0], ("EVAL", blobscripts.DELETE, 2, *keys, term)))
            stale, orphans = 0, list[str]()
            for digest, (status, detail) in zip(part, await self._write(calls), strict=True):
                self._confirmed.pop(digest, None)
                if status == b"STALE":
                    stale = int(detail)
                elif detail:
                    orphans += self._chunks_of(digest, detail)
            await self._chunks.unlink(orphans)
            if stale:
                raise StaleCollectorError(self.tier, term, stale)

    async def fence(self, term: int) -> None:
        groups = [f"{number:03x}" for number in range(GROUPS)]
        for start in range(0, GROUPS, BATCH):
            keys = [self._keys.fence(group) for group in groups[start : start + BATCH]]
            for least in await self._write([(key, ("EVAL", blobscripts.FENCE, 1, key, term)) for key in keys]):
                if least > term:
                    raise StaleCollectorError(self.tier, term, least)

    async def sizes(self, digests: Sequence[str]) -> list[int | None]:
        found = list[int | None]()
        for start in range(0, len(digests), BATCH):
            keys = [self._keys.header(digest) for digest in digests[start : start + BATCH]]
            for value in await self._read([(key, ("GET", key)) for key in keys]):
                header = None if value is None else BlobHeader.unpack(value)
                found.append(None if value is None else 0 if header is None else header.frame_bytes)
        return found

    async def digests(self) -> AsyncIterator[str]:
        async for keys in self._connection.scan(self._keys.headers_pattern):
            for key in keys:
                if DIGEST.match(digest := digest_of_key(key)):
                    yield digest

    async def close(self) -> None:
        await self._connection.close()

    # --- beyond the port ---------------------------------------------------------------------------------------
    async def self_check(self) -> list[Finding]:
        """Chunks that belong to no blob, one finding a blob that they were of."""
        return [_finding(digest, keys) for digest, keys in (await self._orphans()).items()]

    async def sweep(self) -> list[Finding]:
        """Remove what self_check finds, and say so; any number of processes may, while others read and write."""
        orphans = await self._orphans()
        for keys in orphans.values():
            await self._chunks.unlink(keys)
        return [_finding(digest, keys) for digest, keys in orphans.items()]

    async def _orphans(self) -> dict[str, list[str]]:
        found = dict[str, list[str]]()
        async for orphan in orphan_chunks(self._connection, self._chunks, self._keys):
            found.setdefault(orphan.digest, []).extend(orphan.keys)
        return {digest: sorted(set(keys)) for digest, keys in sorted(found.items())}

    # --- how ---------------------------------------------------------------------------------------------------
    def _check(self, digest: str) -> None:
        if not DIGEST.match(digest):
            raise ValueError(f"{digest!r} is no BLAKE3 digest")

    async def _header(self, digest: str) -> bytes | None:
        self._check(digest)
        key = self._keys.header(digest)
        (value,) = await self._read([(key, ("GET", key))])
        return None if value is None else bytes(value)

    async def _look(self, digest: str) -> tuple[bytes | None, bool]:
        """The blob's header, and whether all that it names is there."""
        value = await self._header(digest)
        header = None if value is None else BlobHeader.unpack(value)
        if header is None:
            return value, False
        sizes = await self._read([(key, ("STRLEN", key)) for key in self._keys.chunks(digest, header)])
        return value, sum(sizes) == header.frame_bytes

    async def _store(self, digest: str, pieces: tuple[Buffer, ...], replaces: bytes | None) -> bool:
        """Upload a frame and make it the blob; False when one that is not `replaces` (None: whatever) came first."""
        header = BlobHeader(secrets.token_hex(8), size_of(pieces), self._chunk_bytes)
        if header.frame_bytes > FRAME_BYTES_MAX:
            raise ValueError(f"a frame holds at most {FRAME_BYTES_MAX} bytes, got {header.frame_bytes}")
        key, keys, value = self._keys.header(digest), self._keys.chunks(digest, header), header.pack()
        await self._chunks.send(keys, pieces)
        known = (header.frame_bytes, "any" if replaces is None else "", replaces or b"")
        command = ("EVAL", blobscripts.STORE, 1 + len(keys), key, *keys, value, *known)
        (reply,) = await self._write([(key, command)])
        if reply[0] == b"LOST":
            raise StoreUnavailableError(
                self._connection.shown, "it lost chunks that it had taken: it restarted or evicts"
            )
        if reply[0] == b"KEPT":
            await self._clean(keys)
            await self._confirm(digest, bytes(reply[1]))
            return False
        self._remember(digest, value)
        await self._clean(self._chunks_of(digest, bytes(reply[1])))
        return True

    def _chunks_of(self, digest: str, value: bytes) -> list[str]:
        """Keys of the chunks that a header named."""
        header = BlobHeader.unpack(value)
        return [] if header is None else self._keys.chunks(digest, header)

    async def _clean(self, keys: Sequence[str]) -> None:
        """Remove chunks that no header names; the call has succeeded whether or not that works."""
        try:
            await self._chunks.unlink(keys)
        except StoreUnavailableError as error:
            log.warning("%d chunks are left over in %s: %s", len(keys), self._connection.shown, error)

    async def _confirm(self, digest: str, header: bytes) -> bool:
        """Let replicas confirm a header that another writer may have set a moment ago; False when it is gone."""
        if self._gate.confirmation() is None or self._confirmed.get(digest) == header:
            return True
        key = self._keys.header(digest)
        (is_there,) = await self._write([(key, ("EVAL", blobscripts.TOUCH, 1, key, header))])
        if is_there:
            self._remember(digest, header)
        return bool(is_there)

    def _remember(self, digest: str, header: bytes) -> None:
        self._confirmed[digest] = header
        while len(self._confirmed) > KNOWN_MAX:
            self._confirmed.popitem(last=False)

    async def _read(self, calls: Sequence[tuple[str, Any]]) -> list[Reply]:
        return self._chunks.values(await self._connection.pipeline([Call(*call) for call in calls]))

    async def _write(self, calls: Sequence[tuple[str, Any]]) -> list[Reply]:
        confirm = None if self._cache else self._gate.confirmation()
        return self._chunks.values(await self._connection.pipeline([Call(*call) for call in calls], confirm))
