"""The store's marker."""

from dataclasses import replace
from typing import Final

from forkpoint.errors import StateIncompatibleError
from forkpoint.statestore.records import SCHEMA_VERSION, StoreMarker
from forkpoint.statestore.redis.access import Access
from forkpoint.statestore.redis.connection import RedisConnection
from forkpoint.statestore.redis.hashes import fields_of, flat_of
from forkpoint.statestore.redis.keys import KeySpace
from forkpoint.statestore.redis.url import RedisUrl
from forkpoint.statestore.rules import check_marker

OLDER: Final = (2,)
"""Versions whose stores lack nothing but what a row may lack."""


async def open_store(access: Access, ours: StoreMarker) -> None:
    """Make the store for `ours` when there is none; one of an older version becomes one of this one, unless it is
    another model's. Raises StateIncompatibleError when it is for another marker."""
    if ours.schema_version != SCHEMA_VERSION:
        raise StateIncompatibleError("schema version", str(SCHEMA_VERSION), str(ours.schema_version))
    fields = flat_of(
        schema=ours.schema_version,
        namespace=ours.namespace,
        model=ours.model_digest,
        tokenizer=ours.tokenizer_digest,
    )
    flat = await access.functions.look(access.keys.store, "HGETALL", f"{access.keys.store}:marker")
    if not flat:
        flat = (await access.functions.write(access.keys.store, "open_store", None, *fields)).value
    stored = _marker(fields_of(flat))
    if stored.schema_version in OLDER:
        check_marker(replace(stored, schema_version=SCHEMA_VERSION), ours)
        versions = (stored.schema_version, SCHEMA_VERSION)
        flat = (await access.functions.write(access.keys.store, "upgrade_store", None, *versions)).value
        stored = _marker(fields_of(flat))
    check_marker(stored, ours)


async def read_marker(url: RedisUrl) -> StoreMarker | None:
    """What the store of the URL's namespace was made for, None when there is none yet. For tools without a model."""
    connection = RedisConnection(url)
    try:
        await connection.open()
        base = KeySpace(url.namespace).store
        flat = await connection.call(base, "HGETALL", f"{base}:marker")
        return _marker(fields_of(flat)) if flat else None
    finally:
        await connection.close()


def _marker(fields: dict[str, bytes]) -> StoreMarker:
    return StoreMarker(int(fields["schema"]), fields["namespace"].decode(), fields["model"], fields["tokenizer"])
