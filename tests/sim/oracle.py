"""What must be so, computed from tokens alone: the next token, and the state at every position."""

from collections.abc import Sequence

from forkpoint.limits import PAGE_TOKENS, TILE_TOKENS
from forkpoint.server.engine.batch import Sample
from forkpoint.statestore.chain import grid_hashes, root_hash
from tests.support.hash_engine import EMPTY, LETTERS, HashState, advance, sampled_after
from tests.support.session_site import MARKER


class Oracle:
    """Remembers what it computed: many sessions share their past."""

    def __init__(self) -> None:
        self._next: dict[tuple[bytes, Sample], int] = {}
        self._links: dict[tuple[bytes, int], bytes] = {}

    def state(self, tokens: Sequence[int]) -> HashState:
        """The state after consuming these."""
        state = HashState()
        for token in tokens:
            self._consume(state, token)
        return state

    def wrong_token(self, tokens: Sequence[int], samples: Sequence[Sample | None]) -> str | None:
        """The first token that is not what its sample (None: it was appended) makes of those before it."""
        state = HashState()
        for position, (token, sample) in enumerate(zip(tokens, samples, strict=True)):
            if sample is not None:
                due = self._sampled(state, sample)
                if token != due:
                    return f"token {position} is {token}, the ones before it make it {due}"
            self._consume(state, token)
        return None

    def parts(self, tokens: Sequence[int]) -> dict[str, bytes]:
        """The parts of a checkpoint at the last grid point of these tokens."""
        position = len(tokens) - len(tokens) % TILE_TOKENS
        state = self.state(tokens[:position])
        found = {"kda.000.state.0": state.grid}
        for start in range(0, position, PAGE_TOKENS):
            found[f"mla.page.{start // PAGE_TOKENS:06d}"] = b"".join(state.latents[start : start + PAGE_TOKENS])
        return found

    def grid_points(self, tokens: Sequence[int]) -> list[tuple[int, bytes]]:
        """(position, chain hash) of every grid point."""
        return grid_hashes(root_hash(MARKER), tokens)

    def _sampled(self, state: HashState, sample: Sample) -> int:
        key = (state.running, sample)
        if key not in self._next:
            self._next[key] = sampled_after(state.running, b"".join(state.latents), sample, LETTERS).token_id
        return self._next[key]

    def _consume(self, state: HashState, token: int) -> None:
        key = (state.running, token)
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = advance(state.running, token)
        state.running = link
        state.latents.append(link[:8])
        if state.consumed % TILE_TOKENS == 0:
            state.grid = link


assert HashState().running == EMPTY
