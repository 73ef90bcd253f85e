"""Which server of a cluster holds which hash slot."""

from collections.abc import Iterable
from typing import Any, Final

from redis.crc import key_slot

SLOTS: Final = 16_384


def slot_of(key: str) -> int:
    """The hash slot of a key: of the part in its first braces, when there is one."""
    return int(key_slot(key.encode()))


class SlotMap:
    """Address of the primary of every slot, as one server told it."""

    def __init__(self, reply: Iterable[Any], asked: tuple[str, int]) -> None:
        """`reply`: of CLUSTER SLOTS by the server at `asked`, whose own host may be left out in it."""
        self._primary: dict[int, tuple[str, int]] = {}
        for first, last, primary, *_replicas in reply:
            host = bytes(primary[0] or b"").decode()
            address = (host if host not in ("", "?") else asked[0], int(primary[1]))
            for slot in range(int(first), int(last) + 1):
                self._primary[slot] = address

    def primary(self, slot: int) -> tuple[str, int] | None:
        """Address of the slot's primary; None when no server has the slot."""
        return self._primary.get(slot)

    def move(self, slot: int, address: tuple[str, int]) -> None:
        """A server said that the slot lies at `address` now."""
        self._primary[slot] = address

    def primaries(self) -> list[tuple[str, int]]:
        """Every address, once."""
        return list(dict.fromkeys(self._primary.values()))

    @property
    def complete(self) -> bool:
        """Whether every slot has a server."""
        return len(self._primary) == SLOTS
