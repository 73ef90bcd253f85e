"""What a caller proposes to write at a session's head: records, and the chain that they lead to.

The server can't compute BLAKE3. It compares the chain that the proposal was made from with the session's row, and takes
the new one as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from forkpoint.limits import TILE_TOKENS
from forkpoint.statestore.chain import TOKEN_BYTES, HashChain
from forkpoint.statestore.logrecord import write_records
from forkpoint.statestore.records import Kind
from forkpoint.statestore.redis.access import Head
from forkpoint.statestore.redis.functions import Argument
from forkpoint.statestore.redis.hashes import chain_bytes


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens behind a head."""

    known: Head
    head: Head
    """After them."""
    records: list[tuple[int, bytes]]

    def arguments(self) -> list[Argument]:
        """As take_proposal in log.lua reads it."""
        known, new = self.known.chain, self.head.chain
        numbers = f"{self.known.branch} {known.position} {new.position} {len(self.records)}"
        return [numbers, chain_bytes(known), chain_bytes(new), *(part for record in self.records for part in record)]


def propose(
    known: Head,
    epoch: int,
    kind: Kind,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None] = (),
) -> Proposal:
    """Tokens behind a head that is known."""
    chain = known.chain.copy()
    records = list(write_records(int(known.branch), chain, epoch, kind, token_ids, logprobs))
    return Proposal(known, Head(known.branch, chain), records)


def ask(root: bytes, position: int = 0) -> Proposal:
    """A proposal that no row agrees with: it is how a head is asked for. `position`: where the head should be."""
    head = Head("", HashChain(position, root, bytes(position % TILE_TOKENS * TOKEN_BYTES)))
    return Proposal(head, head, [])
