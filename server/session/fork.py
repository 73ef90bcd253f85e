"""Fork images: one copy of a parent's slot for all children of a fork, made before the parent runs again."""

import logging
from dataclasses import dataclass, field

from forkpoint.errors import NodeCapacityError
from forkpoint.ids import SessionName
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.live import LiveSession, Place, Restored
from forkpoint.server.session.logread import read_all
from forkpoint.server.session.stored_parts import StoredParts
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.records import LogSlice, SessionRow

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ForkImage:
    """A sequence that nobody runs: the parent's state after `consumed` tokens of the children's common prefix.

    `children`: those that have not taken their copy yet. One that was rewound elsewhere since may have another prefix.
    """

    sequence: int
    consumed: int
    can_sample: bool
    chain: HashChain
    numerics_ids: tuple[str, ...]
    exact: bool
    known_grids: frozenset[int]
    stored: StoredParts
    children: set[SessionName] = field(default_factory=set)


class ForkImages:
    """Images by child. They are the first to go when room is short: a child without one restores like anyone."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self._images: list[ForkImage] = []

    async def make(self, parent: LiveSession, position: int, children: tuple[SessionRow, ...]) -> None:
        """Between steps: copy the parent's state for its children, if it is on the engine and not past `position`."""
        if parent.place is not Place.RESIDENT or parent.sequence is None or parent.chain is None:
            return
        if parent.consumed > position or parent.consumed == 0:
            return
        engine = self._core.engine
        # The parent may leave the node while its slot is copied: what it was is noted before.
        image = ForkImage(
            parent.sequence,
            parent.consumed,
            parent.can_sample,
            parent.chain.copy(),
            parent.numerics_ids,
            parent.exact,
            frozenset(parent.known_grids),
            parent.stored.of(parent.sequence).copy(parent.sequence),
            {child.name for child in children},
        )
        try:
            image.sequence = await engine.call(engine.engine.fork, parent.sequence)
        except NodeCapacityError:
            return
        except Exception:
            # The children are in the catalog already: they do without an image.
            log.exception("no image of %s for its children", parent.name)
            return
        self._images.append(image)
        self._core.counters.fork_images += 1

    async def use(self, live: LiveSession) -> bool:
        """Put a child onto the engine from its image. False when there is none; raises NodeCapacityError."""
        image = next((image for image in self._images if live.name in image.children), None)
        if image is None:
            return False
        head, head_hash = live.head, live.row.head_hash
        live.needed_from = head
        earlier = await read_all(self._core.catalog, live.name, image.consumed, head)
        if image not in self._images or live.name not in image.children:
            return False
        if not _leads_to(image.chain, earlier, head_hash):
            # The parent had another owner when it was forked, or the child since, and another past.
            log.warning("%s: its parent's image is not of its log", live.name)
            await self.forget(live.name)
            return False
        live.sequence = await self._take(image, live.name)
        live.tail.prepend(earlier)
        live.consumed = live.needed_from = image.consumed
        live.can_sample, live.chain = image.can_sample, image.chain.copy()
        live.numerics_ids, live.exact = image.numerics_ids, image.exact
        live.known_grids = set(image.known_grids)
        live.stored = image.stored.copy(live.sequence)
        live.last_grid = max(live.known_grids, default=0)
        live.restored = Restored(image.consumed, head - image.consumed, 0, "image", image.exact, 0)
        self._core.counters.fork_images_used += 1
        return True

    async def forget(self, name: SessionName) -> None:
        """The child will not take its copy."""
        for image in [image for image in self._images if name in image.children]:
            image.children.remove(name)
            if not image.children:
                await self._drop(image)

    async def drop_one(self) -> bool:
        """Free the oldest image; False when there is none."""
        if not self._images:
            return False
        await self._drop(self._images[0])
        return True

    async def clear(self) -> None:
        """Free all."""
        while await self.drop_one():
            pass

    async def _take(self, image: ForkImage, name: SessionName) -> int:
        """The child's own sequence: a copy, or the image itself for the last child."""
        image.children.remove(name)
        if not image.children:
            self._images.remove(image)
            return image.sequence
        engine = self._core.engine
        try:
            return await engine.call(engine.engine.fork, image.sequence)
        except NodeCapacityError:
            if image in self._images:
                image.children.add(name)
            raise

    async def _drop(self, image: ForkImage) -> None:
        self._images.remove(image)
        self._core.counters.fork_images_dropped += 1
        await self._core.engine.free(image.sequence)


def _leads_to(chain: HashChain, earlier: LogSlice, head_hash: bytes) -> bool:
    """Whether the tokens of `earlier` behind `chain` make up the log that ends in `head_hash`."""
    whole = chain.copy()
    whole.extend(earlier.token_ids)
    return whole.head_hash() == head_hash
