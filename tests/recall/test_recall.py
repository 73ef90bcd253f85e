"""The trained tiny model remembers values planted 4,000 bytes back, in text that no training run saw."""

from pathlib import Path

import torch

from forkpoint.limits import PAGE_TOKENS, PREFILL_CHUNK_TOKENS_DEFAULT
from forkpoint.model.loading import LoadedModel, load_model
from forkpoint.model.rows import RowBatch
from forkpoint.model.state import StateTensors
from forkpoint.model.tiny.data import END, recall_trial

TINY = Path(__file__).resolve().parents[2] / "model" / "tiny"
SEEDS = range(910_000, 910_005)
DISTANCE_TOKENS = 4000
RIGHT_MIN = 4
"""The bar is 95 % of 200 trials; of five, one may fail."""


class Batch:
    """Sequences that advance together, each with a slot and pages of its own."""

    def __init__(self, model: LoadedModel, count: int, tokens_max: int) -> None:
        self.model = model
        pages = -(-tokens_max // PAGE_TOKENS)
        self.tensors = StateTensors.allocate(model.layout, count, count * pages, model.decoder.device)
        for slot in range(count):
            self.tensors.reset_slot(slot)
        self.tables = [list(range(n * pages, (n + 1) * pages)) for n in range(count)]
        self.consumed = [0] * count

    def consume(self, rows: dict[int, list[int]]) -> dict[int, int]:
        """Consume the given tokens; returns each sequence's most likely next token."""
        ids = [token for tokens in rows.values() for token in tokens]
        ends = [0]
        for tokens in rows.values():
            ends.append(ends[-1] + len(tokens))
        batch = RowBatch(ids, ends, [self.consumed[n] for n in rows], list(rows), [self.tables[n] for n in rows])
        hidden = self.model.decoder.forward(batch, self.tensors)
        for n, tokens in rows.items():
            self.consumed[n] += len(tokens)
        best = self.model.decoder.logits(hidden[[end - 1 for end in ends[1:]]]).argmax(-1).tolist()
        return dict(zip(rows, best, strict=True))


def prefill(batch: Batch, prompts: list[list[int]]) -> dict[int, int]:
    """Consume the prompts in chunks; returns the first token of each answer."""
    first: dict[int, int] = {}
    for start in range(0, max(map(len, prompts)), PREFILL_CHUNK_TOKENS_DEFAULT):
        chunk = {n: p[start : start + PREFILL_CHUNK_TOKENS_DEFAULT] for n, p in enumerate(prompts) if start < len(p)}
        first |= batch.consume(chunk)
    return first


@torch.inference_mode()
def test_the_tiny_model_recalls_values_planted_4000_bytes_back(device: torch.device) -> None:
    torch.set_num_threads(2)
    trials = [recall_trial(seed, DISTANCE_TOKENS) for seed in SEEDS]
    prompts = [prompt for prompt, _ in trials]
    answer_tokens = max(len(value) for _, value in trials) + 1
    batch = Batch(load_model(TINY, device), len(trials), max(map(len, prompts)) + answer_tokens)
    newest = prefill(batch, prompts)
    answers: list[list[int]] = [[] for _ in trials]
    for _ in range(answer_tokens):
        for n, token in newest.items():
            answers[n].append(token)
        newest = batch.consume({n: [token] for n, token in newest.items()})
    expected = [[*value, END] for _, value in trials]
    right = sum(answer == value for answer, value in zip(answers, expected, strict=True))
    assert right >= RIGHT_MIN, f"{right} of {len(trials)} recalled: {list(zip(answers, expected, strict=True))}"
