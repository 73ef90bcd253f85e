"""Names of keys. Everything of a workflow lies in one slot, and what belongs to none in another: docs/formats.md."""

from dataclasses import dataclass
from typing import Final

PREFIX: Final = "forkpoint:"


@dataclass(frozen=True, slots=True)
class KeySpace:
    """The keys of one namespace. A base is what all keys of a slot begin with; its braces decide the slot."""

    namespace: str

    @property
    def store(self) -> str:
        """Base of what belongs to no workflow."""
        return f"{PREFIX}{{{self.namespace}:store}}"

    def workflow(self, workflow: str) -> str:
        """Base of a workflow's keys."""
        return f"{PREFIX}{{{self.namespace}:w:{workflow}}}"
