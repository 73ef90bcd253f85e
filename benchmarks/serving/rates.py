"""Prefill and decode through the engine, as a node runs it without its session layer."""

import random
import statistics
import time
from dataclasses import dataclass
from typing import Final

from benchmarks.percentile import percentile
from benchmarks.record import Measurement
from benchmarks.serving.floor import StepFloor, counted_routes
from forkpoint.limits import PAGE_TOKENS, TILE_TOKENS
from forkpoint.model.loading import LoadedModel
from forkpoint.server.engine.base import Capture
from forkpoint.server.engine.batch import Sample, Work
from forkpoint.server.engine.runner import TorchEngine

WARM_PREFILLS: Final = 2
"""Untimed prefills after the one whose routes are counted: on a GPU a step is recorded when its shapes come again."""
GREEDY: Final = Sample(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass(frozen=True)
class Plan:
    """What is measured. Contexts are multiples of a tile, ascending."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    """Tokens of a prompt that a step consumes: prefill is measured with each."""
    steps: int
    """Timed steps of decode: whole tiles see all kinds of step equally."""
    runs: int
    """Timed prefills of each context, after one that compiles and warms."""
    warm: int = TILE_TOKENS + 1
    """Untimed steps of each batch before: one of them closes a tile. The last counts the experts."""

    def pages(self, context: int, batch: int) -> int:
        """Pages of a batch of sequences that share nothing."""
        return batch * -(-(context + self.warm + self.steps) // PAGE_TOKENS)

    def problem(self, limit: int) -> str | None:
        """Why this can't be measured on a model whose sessions have at most `limit` tokens."""
        for context in self.contexts:
            if context % TILE_TOKENS or context + self.warm + self.steps > limit:
                return f"a context of {context} is no multiple of {TILE_TOKENS}, or too long for {limit} with its steps"
        least = min(*self.chunks, self.steps, self.runs)
        return None if least > 0 else f"{least} is not positive"


class Rates:
    """Measures one model on an engine that has room for the plan's largest case. `copy_rate`: bytes a second."""

    def __init__(self, name: str, model: LoadedModel, engine: TorchEngine, plan: Plan, copy_rate: float) -> None:
        self.name, self.model, self.engine, self.plan, self.copy_rate = name, model, engine, plan, copy_rate
        self.floor = StepFloor(model)
        self._random = random.Random(0)

    def prefill(self, context: int, chunk: int) -> tuple[list[Measurement], Capture]:
        """One prompt of `context` tokens alone, and the state at its end."""
        tokens = tuple(self._random.randrange(self.model.config.vocab_size) for _ in range(context))
        with counted_routes(self.model) as routed:
            self.engine.free(self._consume(tokens, chunk))
        for _ in range(WARM_PREFILLS):
            self.engine.free(self._consume(tokens, chunk))
        seconds = []
        for _ in range(self.plan.runs):
            began = time.perf_counter()
            sequence = self._consume(tokens, chunk)
            seconds.append(time.perf_counter() - began)
            if len(seconds) < self.plan.runs:
                self.engine.free(sequence)
        captured = self.engine.capture(sequence)
        self.engine.free(sequence)
        taken = statistics.median(seconds)
        least = self.floor.prefill(context, chunk, routed.experts) / self.copy_rate
        case = f"{self.name}, prompt of {context:,} in chunks of {chunk:,}"
        return [Measurement(case, "prefill", "tokens/s", context / taken, floor=context / least)], captured

    def decode(self, captured: Capture, batch: int) -> list[Measurement]:
        """`batch` sequences with pages of their own go on from one state, each with random tokens of its own, so that
        they part and choose experts of their own; each step samples."""
        sequences = [self._restored(captured) for _ in range(batch)]
        for _ in range(self.plan.warm - 1):
            self._step(sequences)
        with counted_routes(self.model) as routed:
            self._step(sequences)
        seconds = [self._step(sequences) for _ in range(self.plan.steps)]
        for sequence in sequences:
            self.engine.free(sequence)
        context = captured.grid_position
        least = (
            self.floor.decode(batch, context + self.plan.warm + self.plan.steps // 2, routed.experts) / self.copy_rate
        )
        case = f"{self.name}, {batch:,} sequences of {context:,}"
        median = statistics.median(seconds)
        return [
            Measurement(case, "decode", "tokens/s", batch * len(seconds) / sum(seconds), floor=batch / least),
            Measurement(
                case,
                "decode step",
                "ms",
                median * 1e3,
                floor=least * 1e3,
                p10=percentile(seconds, 0.1) * 1e3,
                p90=percentile(seconds, 0.9) * 1e3,
            ),
            Measurement(case, "experts read, a layer", "experts", routed.experts / max(1, self.floor.moe_layers)),
        ]

    def _consume(self, tokens: tuple[int, ...], chunk: int) -> int:
        """A new sequence that has consumed the tokens; the last step samples, so it is over when this returns."""
        engine = self.engine
        sequence = engine.create()
        for start in range(0, len(tokens), chunk):
            end = start + chunk
            engine.step([Work(sequence, start, tokens[start:end], GREEDY if end >= len(tokens) else None)])
        return sequence

    def _restored(self, captured: Capture) -> int:
        sequence = self.engine.begin_restore(captured.grid_position)
        for spec, data in captured.parts:
            self.engine.load_part(sequence, spec, data)
        self.engine.end_restore(sequence)
        return sequence

    def _step(self, sequences: list[int]) -> float:
        """Seconds of one step that consumes a random token of each sequence and samples the next."""
        vocab = self.model.config.vocab_size
        works = [Work(s, self.engine.consumed(s), (self._random.randrange(vocab),), GREEDY) for s in sequences]
        began = time.perf_counter()
        self.engine.step(works)
        return time.perf_counter() - began
