"""Engines over random models, and what tests of engines compare: digests of everything that a session's state is."""

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from forkpoint.limits import NORM_ROWS, PAGE_TOKENS, TILE_TOKENS
from forkpoint.model.config import ModelConfig
from forkpoint.model.decoder import HybridDecoder
from forkpoint.model.kernels import Kernels
from forkpoint.model.layout import OPEN_SUMS
from forkpoint.model.state import StateLayout, StateTensors
from forkpoint.server.engine.base import Capture, ModelFacts
from forkpoint.server.engine.batch import Sample, Work
from forkpoint.server.engine.facts import layout_tag
from forkpoint.server.engine.runner import TorchEngine

GREEDY: Final = Sample(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, logprobs=True)


def random_engine(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    device: torch.device | str = "cpu",
    *,
    slots: int = 8,
    pages: int = 64,
    sabotage: str | None = None,
    kernels: Kernels | None = None,
) -> TorchEngine:
    """A real engine over a random model, every buffer poisoned."""
    decoder = HybridDecoder(config, weights, device, kernels)
    layout = StateLayout(config, decoder.kernels.dtypes)
    facts = ModelFacts(
        model_digest=bytes(32),
        tokenizer_digest=bytes(32),
        numerics_id="test",
        vocab_size=config.vocab_size,
        context_limit=config.context_limit,
        layout_tag=layout_tag(layout),
    )
    tensors = StateTensors.allocate(layout, slots, pages, device)
    return TorchEngine(facts, decoder, tensors, sabotage)


def consume(engine: TorchEngine, sequence: int, token_ids: Sequence[int], cuts: Sequence[int] = ()) -> None:
    """Consume tokens in one step, or in several that end at the `cuts` (offsets into `token_ids`)."""
    start = engine.consumed(sequence)
    borders = [0, *sorted(cut for cut in set(cuts) if 0 < cut < len(token_ids)), len(token_ids)]
    for first, last in itertools.pairwise(borders):
        if last > first:
            engine.step([Work(sequence, start + first, tuple(token_ids[first:last]))])


def decode(engine: TorchEngine, sequence: int, token_ids: Sequence[int]) -> None:
    """Consume given tokens one by one."""
    consume(engine, sequence, token_ids, range(len(token_ids)))


REFERENCE_ROW: Final = 8
"""The row of a tile that fixes its second reference: the one tensor that may stay as it was when a tile began."""
MakeEngine = Callable[..., TorchEngine]
"""Makes an engine over a test's model: (slots, pages, sabotage)."""
Generated = list[tuple[int, float | None]]
"""Token id and logprob of every sampled token."""


def generate(engine: TorchEngine, sequence: int, count: int, sample: Sample = GREEDY) -> Generated:
    """Sample `count` tokens after the sequence's last, consuming all but the last."""
    return generate_together(engine, {sequence: sample}, count)[0]


def generate_together(
    engine: TorchEngine, samples: Mapping[int, Sample], count: int, last: Sequence[int] | None = None
) -> list[Generated]:
    """The same for several sequences in one batch. `last`: a committed token of each that is still to be consumed."""
    out: list[Generated] = [[] for _ in samples]
    pending: list[tuple[int, ...]] = [()] * len(samples) if last is None else [(token,) for token in last]
    for _ in range(count):
        works = [
            Work(sequence, engine.consumed(sequence), tokens, sample)
            for (sequence, sample), tokens in zip(samples.items(), pending, strict=True)
        ]
        for number, sampled in enumerate(engine.step(works)):
            assert sampled is not None
            out[number].append((sampled.token_id, sampled.logprob))
        pending = [(generated[-1][0],) for generated in out]
    return out


def restore(engine: TorchEngine, captured: Capture, order: Sequence[int] | None = None) -> int:
    """A new sequence from a capture; parts loaded in the given order."""
    sequence = engine.begin_restore(captured.grid_position)
    for index in order if order is not None else range(len(captured.parts)):
        spec, data = captured.parts[index]
        engine.load_part(sequence, spec, data)
    engine.end_restore(sequence)
    return sequence


def capture_digest(captured: Capture) -> str:
    """One digest over position, names, dtypes, shapes and bytes of a capture's parts."""
    digest = hashlib.sha256(str(captured.grid_position).encode())
    for spec, data in captured.parts:
        digest.update(f"{spec.name} {spec.dtype} {spec.shape} {len(data)}".encode())
        digest.update(data)
    return digest.hexdigest()


def state_digest(engine: TorchEngine, sequence: int, norm_rows: int = NORM_ROWS) -> str:
    """One digest over a sequence's whole live state: the capture, the open tile's rows, the live conv inputs, the
    latents after the grid point and the last `norm_rows` final-norm rows.

    Compares byte by byte, so it is stricter than torch.equal: -0 and +0 differ, and so do two NaN payloads.
    """
    live, tensors = engine._sequences[sequence], engine.tensors
    slot, consumed = live.slot, live.consumed
    digest = hashlib.sha256(capture_digest(engine.capture(sequence)).encode())

    def add(tensor: Tensor) -> None:
        if tensor.is_floating_point():
            assert torch.isfinite(tensor).all()
        digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())

    for view in open_tile(engine, sequence).values():
        add(view)
    for back in range(1, min(3, consumed) + 1):
        add(tensors.conv_ring[:, slot, (consumed - back) % 4])
    if consumed % PAGE_TOKENS:
        add(tensors.pages[live.pages[-1], :, : consumed % PAGE_TOKENS])
    for back in range(1, min(norm_rows, consumed - live.rows_from) + 1):
        add(tensors.norm_rows[slot, (consumed - back) % NORM_ROWS])
    return digest.hexdigest()


def open_tile(engine: TorchEngine, sequence: int) -> dict[str, Tensor]:
    """What a sequence's slot holds of its open tile: the rows that are there, and the sums over them."""
    live, tensors = engine._sequences[sequence], engine.tensors
    rows, views = live.consumed % TILE_TOKENS, dict[str, Tensor]()
    for name, spec in tensors.layout.slot_tensors.items():
        if not name.startswith("open_"):
            continue
        view = getattr(tensors, name)[:, live.slot]
        if spec.shape[1] == TILE_TOKENS and name.removeprefix("open_") not in OPEN_SUMS:
            views[name] = view[:, :rows]
        elif rows > (REFERENCE_ROW if name == "open_reference" else 0):
            views[name] = view
    return views


def last_logits(engine: TorchEngine, sequence: int) -> Tensor:
    """Logits [vocab] after the sequence's last consumed token."""
    live = engine._sequences[sequence]
    rows = engine._last_rows([live])
    logits = engine.decoder.logits(rows)[0]
    assert torch.isfinite(logits).all()
    return logits.clone()
