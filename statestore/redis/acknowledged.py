"""Heads that rows tell, held against those that this process was told before.

A branch's head never goes back, nor does a session to an older branch. A row that knows less than was acknowledged has
lost tokens that are said to be safe: a failover or a truncated file took them.
"""

from collections.abc import Sequence
from typing import Any

from forkpoint.errors import LogCorruptError, LogTailMissingError
from forkpoint.ids import SessionName
from forkpoint.limits import TILE_TOKENS
from forkpoint.statestore.redis.access import Access, Head
from forkpoint.statestore.redis.hashes import chain_from
from forkpoint.statestore.redis.pack import Command


async def note(access: Access, name: SessionName, told: Sequence[Any]) -> Head | None:
    """Remember a head as a reply tells it (branch, head and chain; nothing for a session that is not there), and return
    it. Raises LogTailMissingError and LogCorruptError when it is not what was acknowledged; the older one stays."""
    if _fits(access.heads.get(name), _head(told)):
        return _remember(access, name, _head(told))
    # Replies of several connections may come in another order than they were made in: only one to a question that was
    # asked now tells less for sure.
    known = access.heads.get(name)
    found = _head((await _ask(access, [name]))[0])
    if known is not None and not _fits(known, found):
        position = known.chain.position
        if found is not None and found.chain.position == position:
            grid = position - position % TILE_TOKENS
            raise LogCorruptError(str(name), grid, grid, "the head is not the one that was acknowledged")
        raise LogTailMissingError(str(name), position, 0 if found is None else found.chain.position)
    return _remember(access, name, found)


async def learn(access: Access, names: Sequence[SessionName]) -> None:
    """Read the heads of sessions. Raises as note."""
    for name, told in zip(names, await _ask(access, names), strict=True):
        await note(access, name, told)


async def _ask(access: Access, names: Sequence[SessionName]) -> list[Sequence[Any]]:
    calls: list[tuple[str, Command]] = []
    for name in names:
        base = access.keys.workflow(name.workflow)
        calls.append((base, ("HMGET", f"{base}:session:{name.session}", "branch", "head", "chain")))
    return await access.functions.look_many(calls)


def _head(told: Sequence[Any]) -> Head | None:
    if not told or told[0] is None:
        return None
    branch, head, chain = told
    return Head(bytes(branch).decode(), chain_from(int(head), bytes(chain)))


def _fits(known: Head | None, found: Head | None) -> bool:
    """Whether a row may say `found` after `known` was acknowledged."""
    if known is None:
        return True
    if found is None:
        return False
    if known.branch != found.branch:
        return int(known.branch) < int(found.branch)
    if known.chain.position < found.chain.position:
        return True
    return known.chain.position == found.chain.position and known.chain.head_hash() == found.chain.head_hash()


def _remember(access: Access, name: SessionName, found: Head | None) -> Head | None:
    if found is None:
        access.heads.forget(name)
    else:
        access.heads.set(name, found)
    return found
