"""An engine whose state is a hash chain of tokens: any wrong restore, replay or double consumption is visible.

Every token's latent depends on all tokens before it, and every sample on the running hash and on all latents.
"""

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from forkpoint.chat import Chat, PromptIds
from forkpoint.errors import NodeCapacityError, NotUtf8Error, StateIncompatibleError
from forkpoint.limits import PAGE_TOKENS, TILE_TOKENS
from forkpoint.parts import PartSpec
from forkpoint.server.engine.base import Capacity, Capture, ModelFacts
from forkpoint.server.engine.batch import Sample, Sampled, Work

EMPTY = bytes(32)
LETTERS = tuple(range(97, 123))
VOCAB_SIZE = 272


def advance(running: bytes, token: int) -> bytes:
    """The running hash after one more token."""
    return blake2b(running + token.to_bytes(4, "little"), digest_size=32).digest()


def sampled_after(running: bytes, latents: bytes, sample: Sample, alphabet: tuple[int, ...]) -> Sampled:
    """The token that follows: a function of the running hash, all latents and the parameters."""
    seen = blake2b(running + latents, digest_size=16).digest()
    if sample.temperature > 0:
        seen += repr((sample.temperature, sample.top_k, sample.top_p, sample.min_p, sample.seed)).encode()
    value = int.from_bytes(blake2b(seen, digest_size=8).digest(), "little")
    return Sampled(alphabet[value % len(alphabet)], -(value % 997) / 64 if sample.logprobs else None)


@dataclass
class HashState:
    """One sequence: running hash, hash at the grid, and one latent (8 bytes) a token."""

    running: bytes = EMPTY
    grid: bytes = EMPTY
    latents: list[bytes] = field(default_factory=list)
    can_sample: bool = False
    missing: dict[str, PartSpec] = field(default_factory=dict)
    ready: bool = True

    @property
    def consumed(self) -> int:
        return len(self.latents)

    def copy(self) -> "HashState":
        return HashState(self.running, self.grid, list(self.latents), self.can_sample)


class HashEngine:
    """Implements the Engine port. Strict: one thread, no handle reused, work must begin at `consumed`."""

    def __init__(
        self,
        slots: int = 8,
        pages: int = 1024,
        alphabet: tuple[int, ...] = LETTERS,
        numerics_id: str = "hash-1",
        context_limit: int = 4096,
        model: bytes = b"m" * 32,
    ) -> None:
        self.alphabet = alphabet
        self.slots, self.pages = slots, pages
        self.sequences: dict[int, HashState] = {}
        self.steps: list[tuple[Work, ...]] = []
        self.failures: list[Exception] = []
        self.captures = 0
        self.step_pause = 0.0
        self._next = 1
        self._thread: int | None = None
        self.facts_ = ModelFacts(model, b"t" * 32, numerics_id, VOCAB_SIZE, context_limit, "hash-layout")

    @property
    def facts(self) -> ModelFacts:
        return self.facts_

    def create(self) -> int:
        return self._add(HashState())

    def fork(self, sequence: int) -> int:
        return self._add(self._get(sequence).copy())

    def free(self, sequence: int) -> None:
        self._check_thread()
        del self.sequences[sequence]

    def consumed(self, sequence: int) -> int:
        return self._get(sequence).consumed

    def can_sample(self, sequence: int) -> bool:
        return self._get(sequence).can_sample

    def pages_needed(self, sequence: int, token_count: int) -> int:
        consumed = self._get(sequence).consumed
        return _pages(consumed + token_count) - _pages(consumed)

    def step(self, works: Sequence[Work]) -> list[Sampled | None]:
        self._check_thread()
        if self.step_pause:
            threading.Event().wait(self.step_pause)
        if self.failures:
            raise self.failures.pop(0)
        assert len({work.sequence for work in works}) == len(works), "a sequence twice in a step"
        needed = sum(self.pages_needed(work.sequence, len(work.token_ids)) for work in works)
        if needed > self._pages_free():
            raise NodeCapacityError("pages", needed, self._pages_free())
        self.steps.append(tuple(works))
        return [self._run(work) for work in works]

    def capture(self, sequence: int, known: Collection[str] = ()) -> Capture:
        state = self._get(sequence)
        self.captures += 1
        position = state.consumed - state.consumed % TILE_TOKENS
        specs, parts = self.parts(position), []
        settled = frozenset(self.settled_parts(position))
        for spec in specs:
            if spec.name in settled and spec.name in known:
                continue
            if spec.name == "kda.000.state.0":
                parts.append((spec, state.grid))
            else:
                page = int(spec.name.rsplit(".", 1)[1])
                latents = state.latents[page * PAGE_TOKENS : min(position, (page + 1) * PAGE_TOKENS)]
                parts.append((spec, b"".join(latents)))
        return Capture(position, tuple(parts), specs, settled)

    def parts(self, grid_position: int) -> tuple[PartSpec, ...]:
        specs = [PartSpec("kda.000.state.0", "uint8", (32,))]
        for page in range(_pages(grid_position)):
            rows = min(PAGE_TOKENS, grid_position - page * PAGE_TOKENS)
            specs.append(PartSpec(f"mla.page.{page:06d}", "uint8", (rows, 8)))
        return tuple(specs)

    def settled_parts(self, grid_position: int) -> tuple[str, ...]:
        return tuple(f"mla.page.{page:06d}" for page in range(grid_position // PAGE_TOKENS))

    def begin_restore(self, grid_position: int) -> int:
        assert grid_position % TILE_TOKENS == 0
        if _pages(grid_position) > self._pages_free():
            raise NodeCapacityError("pages", _pages(grid_position), self._pages_free())
        missing = {spec.name: spec for spec in self.parts(grid_position)}
        return self._add(HashState(latents=[b"poison!!"] * grid_position, missing=missing, ready=False))

    def load_part(self, sequence: int, spec: PartSpec, data: bytes | bytearray | memoryview) -> None:
        data = bytes(data)
        state = self._get(sequence, ready=False)
        if state.missing.get(spec.name) != spec or len(data) != spec.nbytes:
            raise StateIncompatibleError(spec.name, "another shape", "ours")
        del state.missing[spec.name]
        if spec.name == "kda.000.state.0":
            state.running = state.grid = data
            return
        start = int(spec.name.rsplit(".", 1)[1]) * PAGE_TOKENS
        state.latents[start : start + spec.shape[0]] = [data[i : i + 8] for i in range(0, len(data), 8)]

    def end_restore(self, sequence: int) -> None:
        state = self._get(sequence, ready=False)
        if state.missing:
            raise StateIncompatibleError("parts", f"no {sorted(state.missing)}", "all")
        state.ready = True

    def capacity(self) -> Capacity:
        self._check_thread()
        return Capacity(
            self.slots, self.slots - len(self.sequences), self.pages, self._pages_free(), 32, 8 * PAGE_TOKENS
        )

    def check(self) -> list[str]:
        return []

    def bury(self) -> None:
        """Its process is dead: an engine that keeps its thread waiting lets it go."""

    def _run(self, work: Work) -> Sampled | None:
        state = self._get(work.sequence)
        assert work.start == state.consumed, f"work begins at {work.start}, {state.consumed} are consumed"
        assert work.token_ids or work.sample is not None
        for token in work.token_ids:
            state.running = advance(state.running, token)
            state.latents.append(state.running[:8])
            if state.consumed % TILE_TOKENS == 0:
                state.grid = state.running
        state.can_sample = state.can_sample or bool(work.token_ids)
        if work.sample is None:
            return None
        assert state.can_sample, "no row to sample from"
        return sampled_after(state.running, b"".join(state.latents), work.sample, self.alphabet)

    def _add(self, state: HashState) -> int:
        self._check_thread()
        if len(self.sequences) >= self.slots:
            raise NodeCapacityError("slots", 1, 0)
        if _pages(state.consumed) > self._pages_free():
            raise NodeCapacityError("pages", _pages(state.consumed), self._pages_free())
        handle, self._next = self._next, self._next + 1
        self.sequences[handle] = state
        return handle

    def _get(self, sequence: int, ready: bool = True) -> HashState:
        self._check_thread()
        state = self.sequences[sequence]
        assert state.ready is ready
        return state

    def _pages_free(self) -> int:
        """Forks share nothing here: the strictest count."""
        return self.pages - sum(_pages(state.consumed) for state in self.sequences.values())

    def _check_thread(self) -> None:
        self._thread = self._thread or threading.get_ident()
        assert self._thread == threading.get_ident(), "the engine was called from two threads"


def _pages(position: int) -> int:
    return -(-position // PAGE_TOKENS)


def continuation(
    log: Sequence[int], count: int, sample: Sample, alphabet: tuple[int, ...] = LETTERS
) -> tuple[list[int], list[float | None]]:
    """The tokens that follow `log` and their logprobs, by one undisturbed sequence."""
    engine = HashEngine(1, 1 << 20, alphabet)
    sequence = engine.create()
    tokens, logprobs, feed = [], [], tuple(log)
    for _ in range(count):
        sampled = engine.step([Work(sequence, engine.consumed(sequence), feed, sample)])[0]
        assert sampled is not None
        tokens.append(sampled.token_id)
        logprobs.append(sampled.logprob)
        feed = (sampled.token_id,)
    return tokens, logprobs


class ByteCodec:
    """A byte is a token; ids from 256 on are control tokens."""

    def encode_text(self, text: bytes) -> list[int]:
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise NotUtf8Error("text", error.start) from None
        return list(text)

    def render_chat(self, chat: Chat) -> PromptIds:
        roles = {"user": 256, "assistant": 257}
        tokens = [token for turn in chat.turns for token in (roles[turn.role], *turn.text, 258)]
        return PromptIds((*tokens, 257) if chat.add_generation_prompt else tuple(tokens))

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""
