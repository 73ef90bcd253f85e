"""Who collects which tier, and which blobs are condemned (statestore/collection.py has the rules)."""

from collections.abc import Sequence

from forkpoint.statestore.errors import StaleCollectorError
from forkpoint.statestore.records import CollectorRow
from forkpoint.statestore.redis.access import Access
from forkpoint.statestore.redis.functions import Answer, Argument, Refusal
from forkpoint.statestore.redis.hashes import fields_of


async def get_collector(access: Access, tier: str) -> CollectorRow:
    """Catalog.get_collector."""
    return _row(tier, await access.functions.read(access.keys.store, "get_collector", tier))


async def list_collectors(access: Access) -> list[CollectorRow]:
    """Catalog.list_collectors."""
    found = await access.functions.read(access.keys.store, "list_collectors")
    return [_row(bytes(tier).decode(), flat) for tier, flat in found]


async def elect(access: Access, tier: str, holder: str, expected_term: int) -> CollectorRow:
    """Catalog.elect_collector."""
    answer = await _write(access, "elect_collector", tier, expected_term, holder, expected_term)
    return _row(tier, answer.value)


async def renew(access: Access, tier: str, term: int) -> int:
    """Catalog.renew_collector."""
    return int((await _write(access, "renew_collector", tier, term, term)).value[0])


async def resign(access: Access, tier: str, term: int) -> None:
    """Catalog.resign_collector."""
    await _write(access, "resign_collector", tier, term, term)


async def condemn(access: Access, tier: str, term: int, digests: Sequence[str]) -> None:
    """Catalog.condemn."""
    await _write(access, "condemn", tier, term, term, len(digests), *digests)


async def absolve(access: Access, tier: str, term: int, digests: Sequence[str]) -> None:
    """Catalog.absolve."""
    await _write(access, "absolve", tier, term, term, len(digests), *digests)


async def list_condemned(access: Access, tier: str, after: str, limit: int) -> list[str]:
    """Catalog.list_condemned."""
    found = await access.functions.read(access.keys.store, "list_condemned", tier, after, limit)
    return [bytes(digest).decode() for digest in found]


async def absolutions(access: Access) -> int:
    """Catalog.absolutions."""
    return int(await access.functions.read(access.keys.store, "absolutions"))


async def forget(access: Access, upto: int) -> None:
    """Catalog.forget_absolutions."""
    await access.functions.write(access.keys.store, "forget_absolutions", None, upto)


async def _write(access: Access, function: str, tier: str, term: int, *arguments: Argument) -> Answer:
    try:
        return await access.functions.write(access.keys.store, function, None, tier, *arguments)
    except Refusal as refusal:
        raise StaleCollectorError(tier, term, refusal.number(0)) from None


def _row(tier: str, flat: Sequence[bytes]) -> CollectorRow:
    fields = fields_of(flat)
    if not fields:
        return CollectorRow(tier, "", 0, 0)
    return CollectorRow(tier, fields["holder"].decode(), int(fields["term"]), int(fields["counter"]))
