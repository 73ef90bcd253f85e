"""Who was served when: the memory that makes turns fair. A value, handed from one plan to the next."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

FORGET_AFTER_STEPS: Final = 4096
"""A workflow's turn is kept this long after it was last served, so that coming and going gains nothing."""


@dataclass(frozen=True, slots=True)
class History(Generic[K]):
    """`step` numbers the plans. `turns`: the step since which a (workflow, class of work) waits: the one it was first
    seen in, or the one after it was last served. `waiting_since`: the same of each session; sessions no longer listed
    are dropped.
    """

    step: int = 0
    turns: Mapping[tuple[str, str], int] = field(default_factory=dict)
    waiting_since: Mapping[K, int] = field(default_factory=dict)

    def waited(self, key: K) -> int:
        """Steps that the session was passed over since it was last served; 0 for one never seen."""
        return self.step - self.waiting_since.get(key, self.step)

    def turn(self, workflow: str, work: str) -> int:
        """Step since which the workflow waits. A newcomer queues behind all who were passed over before."""
        return self.turns.get((workflow, work), self.step)

    def after(self, listed: Iterable[tuple[K, str, str]], served: Iterable[K]) -> "History[K]":
        """The history after a plan over the `listed` (key, workflow, class of work), of which `served` got a share."""
        got = set(served)
        turns = {place: step for place, step in self.turns.items() if self.step - step < FORGET_AFTER_STEPS}
        waiting: dict[K, int] = {}
        for key, workflow, work in listed:
            waiting[key] = self.step + 1 if key in got else self.waiting_since.get(key, self.step)
            turns.setdefault((workflow, work), self.step)
            if key in got:
                turns[workflow, work] = self.step + 1
        return History(self.step + 1, turns, waiting)


def take_turns(groups: Mapping[str, list[T]]) -> list[T]:
    """One from each group in turn, groups in the mapping's order, until all are taken."""
    out: list[T] = []
    for round_number in range(max(map(len, groups.values()), default=0)):
        out += [items[round_number] for items in groups.values() if round_number < len(items)]
    return out
