"""Lab: an engine whose every row, in every step, is compared with a quiet reference run of the same tokens."""

import random
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from forkpoint.model.config import ModelConfig
from forkpoint.model.decoder import HybridDecoder
from forkpoint.model.rows import RowBatch
from forkpoint.model.state import StateTensors
from forkpoint.server.engine.base import Capture
from forkpoint.server.engine.batch import Sample, Sampled, Work
from forkpoint.server.engine.runner import TorchEngine
from tests.support.engines import capture_digest, consume, last_logits, random_engine, restore, state_digest

STREAM_TOKENS: Final = 1100
"""Two split borders (512, 1024) and some."""


class RecordingDecoder(HybridDecoder):
    """Keeps the last forward pass's batch and rows."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], device: torch.device | str) -> None:
        super().__init__(config, weights, device)
        self.batch: RowBatch | None = None
        self.rows: Tensor | None = None

    def forward(self, batch: RowBatch, tensors: StateTensors) -> Tensor:
        self.batch, self.rows = batch, super().forward(batch, tensors)
        return self.rows


class Stream:
    """Random tokens, and what a quiet run makes of them: one sequence alone, one forward pass, fresh memory."""

    def __init__(self, model: "Model", token_ids: Sequence[int]) -> None:
        self.model, self.token_ids = model, tuple(token_ids)
        decoder = RecordingDecoder(model.config, model.weights, model.device)
        pages = -(-len(self.token_ids) // 64)
        self._engine = random_engine(model.config, model.weights, model.device, slots=1, pages=pages)
        self._engine.decoder = decoder
        sequence = self._engine.create()
        consume(self._engine, sequence, self.token_ids)
        assert decoder.rows is not None and torch.isfinite(decoder.rows).all()
        self.rows = decoder.rows
        """[T, hidden]: the final-norm row of every position."""
        self.logits = decoder.logits(self.rows)
        self._engine.free(sequence)
        self._digests: dict[tuple[int, int], str] = {}
        self._captures: dict[int, str] = {}

    def digest(self, position: int, norm_rows: int) -> str:
        """Digest of the whole state after one pass over the first `position` tokens."""
        if (position, norm_rows) not in self._digests:
            self._quiet(position)
        return self._digests[position, norm_rows]

    def capture_digest(self, position: int) -> str:
        """Digest of the checkpoint after one pass over the first `position` tokens."""
        if position not in self._captures:
            self._quiet(position)
        return self._captures[position]

    def _quiet(self, position: int) -> None:
        sequence = self._engine.create()
        consume(self._engine, sequence, self.token_ids[:position])
        for norm_rows in range(3):
            self._digests[position, norm_rows] = state_digest(self._engine, sequence, norm_rows)
        self._captures[position] = capture_digest(self._engine.capture(sequence))
        self._engine.free(sequence)


class Model:
    """A random model on a device and its reference streams."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.config, self.weights, self.device = config, weights, device
        self._streams: dict[object, Stream] = {}

    def stream(self, name: int = 0, tokens: int = STREAM_TOKENS) -> Stream:
        """One of any number of random streams."""
        if (name, tokens) not in self._streams:
            random_ = random.Random(f"stream {name}")
            ids = [random_.randrange(self.config.vocab_size) for _ in range(tokens)]
            self._streams[name, tokens] = Stream(self, ids)
        return self._streams[name, tokens]

    def branch(self, position: int, tokens: int, name: int = 0) -> Stream:
        """Stream 0 up to `position`, then `tokens` of another one."""
        key = ("branch", position, tokens, name)
        if key not in self._streams:
            other = self.stream(1000 + name, tokens).token_ids
            self._streams[key] = Stream(self, self.stream().token_ids[:position] + other)
        return self._streams[key]

    def lab(self, slots: int = 8, pages: int = 64, sabotage: str | None = None) -> "Lab":
        """A fresh engine."""
        return Lab(self, slots, pages, sabotage)


class Lab:
    """An engine whose sequences each follow a stream. Every step compares every row, bit for bit."""

    def __init__(self, model: Model, slots: int, pages: int, sabotage: str | None) -> None:
        self.model = model
        self.engine: TorchEngine = random_engine(
            model.config, model.weights, model.device, slots=slots, pages=pages, sabotage=sabotage
        )
        self.decoder = RecordingDecoder(model.config, model.weights, model.device)
        self.engine.decoder = self.decoder
        self.following: dict[int, Stream] = {}

    def create(self, stream: Stream | None = None) -> int:
        """A new sequence that follows `stream` (stream 0 unless given)."""
        sequence = self.engine.create()
        self.following[sequence] = stream or self.model.stream()
        return sequence

    def fork(self, sequence: int, stream: Stream | None = None) -> int:
        """A fork that follows `stream`, its parent's unless given."""
        child = self.engine.fork(sequence)
        self.following[child] = stream or self.following[sequence]
        return child

    def free(self, *sequences: int) -> None:
        for sequence in sequences:
            self.engine.free(sequence)
            del self.following[sequence]

    def restore(self, captured: Capture, stream: Stream | None = None, order: Sequence[int] | None = None) -> int:
        """A sequence restored from a capture, its parts loaded in `order`."""
        sequence = restore(self.engine, captured, order)
        self.following[sequence] = stream or self.model.stream()
        return sequence

    def step(self, *shares: tuple[int, int], sample: Sample | None = None) -> list[Sampled | None]:
        """One step: each (sequence, count) consumes its stream's next `count` tokens."""
        works = []
        for sequence, count in shares:
            start = self.engine.consumed(sequence)
            ids = self.following[sequence].token_ids[start : start + count]
            assert len(ids) == count, "the stream ends"
            works.append(Work(sequence, start, ids, sample))
        sampled = self.engine.step(works)
        self._compare_rows([work for work in works if work.token_ids])
        return sampled

    def run(self, sequence: int, *counts: int) -> int:
        """Steps of the sequence alone; returns it."""
        for count in counts:
            self.step((sequence, count))
        return sequence

    def check_state(self, *sequences: int) -> None:
        """Compare the whole state and the last logits with a quiet run, and check the pools."""
        for sequence in sequences:
            stream, live = self.following[sequence], self.engine._sequences[sequence]
            norm_rows = min(2, live.consumed - live.rows_from)
            assert state_digest(self.engine, sequence) == stream.digest(live.consumed, norm_rows)
            assert capture_digest(self.engine.capture(sequence)) == stream.capture_digest(live.consumed)
            if norm_rows:
                assert torch.equal(last_logits(self.engine, sequence), stream.logits[live.consumed - 1])
        assert self.engine.check() == []

    def _compare_rows(self, works: Sequence[Work]) -> None:
        batch, rows = self.decoder.batch, self.decoder.rows
        if not works:
            return
        assert batch is not None and rows is not None
        for number, work in enumerate(works):
            ours = rows[batch.cu_seqlens[number] : batch.cu_seqlens[number + 1]]
            quiet = self.following[work.sequence].rows[work.start : work.start + len(work.token_ids)]
            assert torch.equal(ours, quiet), f"rows of sequence {work.sequence} at {work.start}"
