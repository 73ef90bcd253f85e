"""Pool: ids of equal pieces of memory (slots, pages) with reference counts. Knows nothing of their content."""

from collections import Counter
from collections.abc import Iterable, Sequence

from forkpoint.errors import NodeCapacityError


class Pool:
    """Ids 0 to size - 1, each free or held by one or more holders.

    Not thread-safe. A method that raises changes nothing. An id given back last is taken first: stale content shows
    at once in tests, and on a GPU it is the one most likely still in L2.
    """

    def __init__(self, name: str, size: int) -> None:
        """`name` in the plural, for errors. Raises ValueError for a negative size."""
        if size < 0:
            raise ValueError(f"a pool of {size} {name}")
        self.name, self.size = name, size
        self._holders = [0] * size
        self._free = list(range(size - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of free ids."""
        return len(self._free)

    def free_ids(self) -> tuple[int, ...]:
        """The free ids."""
        return tuple(self._free)

    def holders(self, piece: int) -> int:
        """How many hold an id; 0 when it is free."""
        return self._holders[self._known(piece)]

    def take(self, count: int) -> list[int]:
        """Take `count` free ids, each with one holder. Raises NodeCapacityError, taking none."""
        if count < 0:
            raise ValueError(f"take {count} {self.name}")
        if count > len(self._free):
            raise NodeCapacityError(self.name, count, len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for piece in taken:
            self._holders[piece] = 1
        return taken

    def share(self, pieces: Sequence[int]) -> None:
        """Add a holder to each id. Raises ValueError when one of them is free."""
        self._require_held(pieces)
        for piece in pieces:
            self._holders[piece] += 1

    def give_back(self, pieces: Sequence[int]) -> list[int]:
        """Remove a holder from each id and return those that became free. Raises ValueError for a double free."""
        self._require_held(pieces)
        freed: list[int] = []
        for piece in pieces:
            self._holders[piece] -= 1
            if self._holders[piece] == 0:
                self._free.append(piece)
                freed.append(piece)
        return freed

    def check(self, held: Iterable[int]) -> list[str]:
        """Every inconsistency between this pool and `held`, the ids as their holders list them, once per holder."""
        problems: list[str] = []
        if len(set(self._free)) != len(self._free):
            problems.append(f"{self.name}: an id is free twice")
        used = sum(1 for count in self._holders if count > 0)
        if len(self._free) + used != self.size:
            problems.append(f"{self.name}: {len(self._free)} free + {used} used is not {self.size}")
        problems += [f"{self.name}: {piece} is free and held" for piece in self._free if self._holders[piece]]
        listed = Counter(held)
        for piece in sorted(set(listed) | {i for i, count in enumerate(self._holders) if count}):
            counted = self._holders[piece] if 0 <= piece < self.size else 0
            if counted != listed[piece]:
                problems.append(f"{self.name}: {piece} counts {counted} holders, {listed[piece]} list it")
        return problems

    def _known(self, piece: int) -> int:
        # Python would take -1 for the last id: a sentinel must not be freed as if it were one.
        if not 0 <= piece < self.size:
            raise ValueError(f"{self.name}: there is no {piece}")
        return piece

    def _require_held(self, pieces: Sequence[int]) -> None:
        for piece, times in Counter(pieces).items():
            if self._holders[self._known(piece)] < times:
                raise ValueError(f"{self.name}: {piece} is given up more often than it is held")
