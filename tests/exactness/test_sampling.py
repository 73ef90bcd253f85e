"""Sampled tokens and logprobs are a function of tokens, parameters and seed: no batch, fork or restore changes them."""

import random

import pytest

from forkpoint.server.engine.batch import Sample, Work
from tests.support.engines import Generated, consume, generate, generate_together, random_engine, restore
from tests.support.lab import Lab, Model

SAMPLES = [
    Sample(0.0, 0, 1.0, 0.0, seed=0, logprobs=True),
    Sample(1.0, 0, 1.0, 0.0, seed=1, logprobs=True),
    Sample(0.7, 0, 0.9, 0.0, seed=-(2**63), logprobs=True),
    Sample(1.3, 20, 1.0, 0.0, seed=2**63 - 1, logprobs=True),
    Sample(1.0, 0, 1.0, 0.05, seed=42, logprobs=True),
    Sample(2.0, 50, 0.95, 0.02, seed=7, logprobs=True),
]


def expected(model: Model, prompt: int, count: int, sample: Sample) -> Generated:
    """What a session alone generates, uninterrupted."""
    engine = random_engine(model.config, model.weights, model.device)
    sequence = engine.create()
    consume(engine, sequence, model.stream().token_ids[:prompt])
    return generate(engine, sequence, count, sample)


@pytest.mark.parametrize("prompt", [63, 79, 80])
def test_a_generation_interrupted_anywhere_by_a_restore_gives_the_same_tokens(model: Model, prompt: int) -> None:
    """For every setting: 20 tokens in one go; 1, 2 or 11 of them, evicted, restored, and the rest."""
    prompt_ids = model.stream().token_ids[:prompt]
    engine = model.lab(slots=18, pages=60).engine
    sequences = [engine.create() for _ in SAMPLES]
    for sequence in sequences:
        consume(engine, sequence, prompt_ids)
    whole = generate_together(engine, dict(zip(sequences, SAMPLES, strict=True)), 20)
    for sequence in sequences:
        engine.free(sequence)
    for cut in (1, 2, 11):
        sequences = [engine.create() for _ in SAMPLES]
        for sequence in sequences:
            consume(engine, sequence, prompt_ids)
        begun = generate_together(engine, dict(zip(sequences, SAMPLES, strict=True)), cut)
        captures = [engine.capture(sequence) for sequence in sequences]
        for sequence in sequences:
            engine.free(sequence)
        restored = [restore(engine, captured) for captured in reversed(captures)][::-1]
        for sequence, captured, tokens in zip(restored, captures, begun, strict=True):
            # The log holds the prompt and what was sampled; its last token is consumed by the next step.
            log = [*prompt_ids, *(token for token, _ in tokens)]
            consume(engine, sequence, log[captured.grid_position : -1])
        last = [tokens[-1][0] for tokens in begun]
        rest = generate_together(engine, dict(zip(restored, SAMPLES, strict=True)), 20 - cut, last)
        assert [b + r for b, r in zip(begun, rest, strict=True)] == whole
        for sequence in restored:
            engine.free(sequence)


def test_sessions_with_other_parameters_in_the_batch_change_no_token(model: Model, rng: random.Random) -> None:
    whole = [expected(model, 30 + n, 12, sample) for n, sample in enumerate(SAMPLES)]
    engine = model.lab().engine
    sequences = [engine.create() for _ in SAMPLES]
    for n, sequence in enumerate(sequences):
        consume(engine, sequence, model.stream().token_ids[: 30 + n])
    got: list[Generated] = [[] for _ in SAMPLES]
    while pending := [n for n in range(len(SAMPLES)) if len(got[n]) < 12]:
        chosen = rng.sample(pending, rng.randint(1, len(pending)))
        works = []
        for n in chosen:
            last = tuple(token for token, _ in got[n][-1:])
            works.append(Work(sequences[n], engine.consumed(sequences[n]), last, SAMPLES[n]))
        for n, sampled in zip(chosen, engine.step(works), strict=True):
            assert sampled is not None
            got[n].append((sampled.token_id, sampled.logprob))
    assert got == whole


def test_sampling_at_the_head_again_gives_the_same_token_and_consumes_nothing(model: Model) -> None:
    lab = model.lab()
    sequence = lab.run(lab.create(), 40)
    for sample in SAMPLES:
        first = lab.step((sequence, 0), sample=sample)
        assert first == lab.step((sequence, 0), sample=sample)
        assert lab.engine.consumed(sequence) == 40
    lab.check_state(sequence)


def test_a_token_sampled_with_its_step_equals_one_sampled_later_from_the_stored_row(model: Model) -> None:
    for length in (1, 15, 16, 17, 64):
        lab = model.lab()
        at_once, later = lab.create(), lab.create()
        with_step = lab.step((at_once, length), sample=SAMPLES[1])
        lab.step((later, length))
        assert lab.step((later, 0), sample=SAMPLES[1]) == with_step


def test_a_fork_at_the_head_samples_what_its_parent_samples(model: Model) -> None:
    lab: Lab = model.lab()
    parent = lab.run(lab.create(), 33)
    child = lab.fork(parent)
    one, other = lab.step((parent, 0), (child, 0), sample=SAMPLES[2])
    assert one == other
    assert generate(lab.engine, parent, 10, SAMPLES[2]) == generate(lab.engine, child, 10, SAMPLES[2])


def test_seeds_and_positions_matter(model: Model) -> None:
    """A control: were the noise constant, all of the above would pass for the wrong reason."""
    drawn = {tuple(expected(model, 40, 8, Sample(1.5, 0, 1.0, 0.0, seed))) for seed in range(6)}
    assert len(drawn) == 6
