"""Tokens of a log by kind."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from forkpoint.ids import SessionName
from forkpoint.server.session.api import Usage
from forkpoint.server.session.logread import read_slices
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.records import Kind, SessionRow

BRANCHES_KEPT: Final = 4096
"""Branches whose count is remembered: a few tens of bytes each."""


class UsageCounter:
    """Counts a branch's log once and then only what came since."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._known: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """branch: (position, prompt tokens before it)"""

    async def count(self, name: SessionName, branch: str, head: int) -> Usage:
        """Usage of positions [0, head), ancestors' included."""
        position, prompt = self._known.get(branch, (0, 0))
        if position > head:
            position, prompt = 0, 0
        prompt += await self._prompt(name, position, head)
        self._remember(branch, head, prompt)
        return Usage(prompt, head - prompt)

    async def inherit(self, parent_branch: str, children: Sequence[SessionRow]) -> None:
        """New children of one fork of a branch: what is known of its log is not read again, and what is not, once."""
        first = children[0]
        position, prompt = self._known.get(parent_branch, (0, 0))
        if position <= first.head:
            self._remember(first.branch, position, prompt)
        prompt = (await self.count(first.name, first.branch, first.head)).prompt_tokens
        for branch in (parent_branch, *(child.branch for child in children)):
            self._remember(branch, first.head, prompt)

    def _remember(self, branch: str, head: int, prompt: int) -> None:
        if head >= self._known.get(branch, (0, 0))[0]:
            self._known[branch] = (head, prompt)
            self._known.move_to_end(branch)
            if len(self._known) > BRANCHES_KEPT:
                self._known.popitem(last=False)

    async def between(self, name: SessionName, start: int, end: int) -> Usage:
        """Usage of positions [start, end)."""
        prompt = await self._prompt(name, start, end)
        return Usage(prompt, end - start - prompt)

    async def _prompt(self, name: SessionName, start: int, end: int) -> int:
        parts = read_slices(self._catalog, name, start, end)
        return sum([part.kinds.count(Kind.PROMPT) async for part in parts])
