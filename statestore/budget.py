"""Bytes that a tier may hold: which checkpoints are dropped when those that retention keeps are too many."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from forkpoint.statestore.records import ManifestKey
from forkpoint.statestore.retention import Keep, Verdict

_ORDER: Final = {Keep.LADDER: 0, Keep.FORK_POINT: 1, Keep.LAST: 2}
"""What is dropped first. A session's newest usable checkpoint, and what a caller asked for, is never."""


def evict(
    verdicts: Sequence[Verdict],
    blobs: Mapping[ManifestKey, Sequence[bytes]],
    sizes: Mapping[bytes, int],
    pinned: Collection[ManifestKey],
    budget_bytes: int,
) -> tuple[list[Verdict], int]:
    """Which of `verdicts` (all that stay, of the whole store) are to go so that what the manifests in `blobs` name
    fits the budget, and by how many bytes it still does not.

    `sizes`: stored bytes by digest, of the blobs that the tier holds. Checkpoints of one manifest go together or not at
    all, and none goes whose blobs others need anyway.
    """
    names = Counter(digest for digests in blobs.values() for digest in set(digests))
    excess = sum(sizes.get(digest, 0) for digest in names) - budget_bytes
    by_manifest: dict[ManifestKey, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        by_manifest[verdict.row.manifest_key].append(verdict)
    chosen: list[ManifestKey] = []
    for key in _candidates(by_manifest, pinned):
        if excess <= 0:
            break
        names.subtract(set(blobs.get(key, ())))
        excess -= sum(sizes.get(digest, 0) for digest in set(blobs.get(key, ())) if names[digest] == 0)
        chosen.append(key)
    kept = _without_use(chosen, blobs, sizes, names)
    return [verdict for key in chosen if key not in kept for verdict in by_manifest[key]], max(0, excess)


def _candidates(
    by_manifest: Mapping[ManifestKey, Sequence[Verdict]], pinned: Collection[ManifestKey]
) -> list[ManifestKey]:
    """Manifests that may go, in the order in which they do: the oldest first among equals."""
    order: list[tuple[int, int, ManifestKey]] = []
    for key, verdicts in by_manifest.items():
        ranks = [_ORDER.get(verdict.reason, -1) for verdict in verdicts if isinstance(verdict.reason, Keep)]
        if key not in pinned and min(ranks) >= 0:
            order.append((max(ranks), max(verdict.row.create_us for verdict in verdicts), key))
    return [key for _, _, key in sorted(order)]


def _without_use(
    chosen: Sequence[ManifestKey],
    blobs: Mapping[ManifestKey, Sequence[bytes]],
    sizes: Mapping[bytes, int],
    names: "Counter[bytes]",
) -> set[ManifestKey]:
    """Those of `chosen` that can stay after all, because what they name stays in any case; the last chosen first."""
    kept: set[ManifestKey] = set()
    for key in reversed(chosen):
        digests = set(blobs.get(key, ()))
        if all(names[digest] > 0 or sizes.get(digest, 0) == 0 for digest in digests):
            names.update(digests)
            kept.add(key)
    return kept
