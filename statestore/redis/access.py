"""What every call of the catalog works with."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from forkpoint.errors import InvalidFieldError
from forkpoint.ids import SessionName
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.records import RequestKey
from forkpoint.statestore.redis.functions import Functions
from forkpoint.statestore.redis.keys import KeySpace

HEADS_MAX: Final = 65_536
"""Sessions whose heads are remembered: about 300 bytes each."""
TRIES: Final = 64
"""Times that a write is composed anew because others wrote first: each loss means that another call succeeded."""


@dataclass(frozen=True, slots=True)
class Head:
    """What this process knows of a session's head. It may be behind; functions compare it with the row."""

    branch: str
    chain: HashChain


class Heads:
    """Heads of the sessions that this process wrote to last: what lets a write take one round trip.

    What is in here was acknowledged or read: acknowledged.py holds the store to it.
    """

    def __init__(self, most: int = HEADS_MAX) -> None:
        self._most = most
        self._heads: OrderedDict[SessionName, Head] = OrderedDict()

    def get(self, name: SessionName) -> Head | None:
        """The head as it was when this process last heard of it."""
        return self._heads.get(name)

    def set(self, name: SessionName, head: Head) -> None:
        """Remember a head; the one that was set longest ago is forgotten for it."""
        self._heads[name] = head
        self._heads.move_to_end(name)
        if len(self._heads) > self._most:
            self._heads.popitem(last=False)

    def forget(self, name: SessionName) -> None:
        """Nothing is known any more."""
        self._heads.pop(name, None)


@dataclass(frozen=True, slots=True)
class Access:
    """An open catalog, for the functions of this folder."""

    functions: Functions
    keys: KeySpace
    root: bytes
    """h(0)."""
    heads: Heads

    @property
    def empty(self) -> HashChain:
        """The chain of the empty log."""
        return HashChain(0, self.root)

    def request_in(self, workflow: str, request: RequestKey | None) -> RequestKey | None:
        """The request of a call on a workflow, whose slot must hold both. Raises InvalidFieldError."""
        if request is not None and request.workflow != workflow:
            problem = f"request of workflow {request.workflow!r} for a call on {workflow!r}"
            raise InvalidFieldError("request_id", problem)
        return request
