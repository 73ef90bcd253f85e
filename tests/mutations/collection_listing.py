"""Mistakes of whoever collects garbage, and of whoever saves meanwhile."""

from typing import Final

from tests.mutations.mutation import Mutation

COLLECTION: Final = (
    Mutation(
        "look-again-for-the-refused-only",
        "a save that waited for a collector does not look again for what was not refused",
        "statestore/checkpoint.py",
        "                saved = _merged(saved, await self._saver.save(parts))\n",
        "                pass\n",
        ("tests/statestore/test_checkpoint_store.py",),
    ),
    Mutation(
        "collect-without-grace",
        "a blob is deleted when it is first seen unnamed",
        "statestore/gc.py",
        "if now - since >= self._options.grace_seconds]",
        "if now >= since]",
        ("tests/statestore/test_gc.py",),
    ),
    Mutation(
        "skip-the-second-look",
        "what was named since the mark is deleted all the same",
        "statestore/gc.py",
        "        await mark.catch_up()\n",
        "",
        ("tests/statestore/test_gc_interleavings.py",),
    ),
    Mutation(
        "name-the-condemned",
        "a manifest that names a condemned blob is committed",
        "statestore/memory/collection.py",
        "        if refused:\n            raise BlobsCondemnedError(refused)\n",
        "",
        ("tests/statestore/test_gc_interleavings.py",),
    ),
    Mutation(
        "ignore-pins",
        "a manifest that a restorer pinned is removed",
        "statestore/memory/collection.py",
        "        return named | {pin.key for pin in tables.pins.values()}\n",
        "        return named\n",
        ("tests/statestore/test_gc.py",),
    ),
    Mutation(
        "delete-under-an-old-term",
        "a collector that was replaced goes on deleting",
        "statestore/memory/blobs.py",
        "        if term < self._term:\n",
        "        if False:\n",
        ("tests/statestore/test_gc_interleavings.py",),
    ),
    Mutation(
        "drop-the-last-ancestor",
        "retention keeps no checkpoint only because a session needs it",
        "statestore/retention.py",
        "    if need is Keep.ANCESTOR:\n        return need\n",
        "",
        ("tests/statestore/test_retention.py",),
    ),
)
