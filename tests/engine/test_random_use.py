"""Thousands of random calls, wrong ones among them: the pools stay sound, and a refusal changes nothing."""

import random

import pytest

from forkpoint.errors import ForkpointError, NodeCapacityError, StateIncompatibleError, TokenOutOfRangeError
from forkpoint.server.engine.base import Capture
from forkpoint.server.engine.batch import Work
from forkpoint.server.engine.runner import TorchEngine
from tests.support.engines import GREEDY, MakeEngine, capture_digest, consume, state_digest

Refusal = type[ForkpointError] | type[ValueError] | type[KeyError]


class RandomUser:
    """Drives an engine and remembers the tokens of every sequence."""

    def __init__(self, engine: TorchEngine, random_: random.Random) -> None:
        self.engine, self.random = engine, random_
        self.ready: dict[int, list[int]] = {}
        self.loading: dict[int, tuple[list[int], Capture]] = {}
        self.captures: list[tuple[list[int], Capture]] = []
        self.refused = 0

    def act(self) -> None:
        """One call, or one call that must be refused."""
        actions = [self.create, self.step, self.step, self.step, self.fork, self.free, self.capture]
        actions += [self.begin_restore, self.load, self.load, self.load, self.abandon, self.bad_step, self.bad_part]
        self.random.choice(actions)()
        assert self.engine.check() == []

    def create(self) -> None:
        if self.engine.capacity().slots_free:
            self.ready[self.engine.create()] = []
        else:
            self.refuse(NodeCapacityError, self.engine.create)

    def step(self) -> None:
        chosen = self.random.sample(sorted(self.ready), self.random.randint(0, len(self.ready)))
        works, pages = [], 0
        for sequence in chosen:
            count = self.random.choice([1, 1, 1, 2, 7, 16, 30, 65])
            ids = tuple(self.random.randrange(self.engine.facts.vocab_size) for _ in range(count))
            sample = GREEDY if self.random.random() < 0.5 else None
            works.append(Work(sequence, len(self.ready[sequence]), ids, sample))
            pages += self.engine.pages_needed(sequence, count)
        if pages > self.engine.capacity().pages_free:
            self.refuse(NodeCapacityError, lambda: self.engine.step(works))
            return
        sampled = self.engine.step(works)
        assert [work.sample is not None for work in works] == [token is not None for token in sampled]
        for work in works:
            self.ready[work.sequence] += work.token_ids

    def fork(self) -> None:
        if not self.ready:
            return
        parent = self.random.choice(sorted(self.ready))
        free = self.engine.capacity()
        if free.slots_free and free.pages_free >= (len(self.ready[parent]) % 64 > 0):
            self.ready[self.engine.fork(parent)] = list(self.ready[parent])
        else:
            self.refuse(NodeCapacityError, lambda: self.engine.fork(parent))

    def free(self) -> None:
        if len(self.ready) > 1:
            gone = self.random.choice(sorted(self.ready))
            self.engine.free(gone)
            del self.ready[gone]
            self.refuse(KeyError, lambda: self.engine.free(gone))

    def capture(self) -> None:
        if self.ready:
            sequence = self.random.choice(sorted(self.ready))
            tokens = self.ready[sequence]
            self.captures.append((tokens[: len(tokens) // 16 * 16], self.engine.capture(sequence)))

    def begin_restore(self) -> None:
        if self.captures:
            tokens, captured = self.random.choice(self.captures)
            free = self.engine.capacity()
            if free.slots_free and free.pages_free >= -(-len(tokens) // 64):
                self.loading[self.engine.begin_restore(len(tokens))] = (list(tokens), captured)
            else:
                self.refuse(NodeCapacityError, lambda: self.engine.begin_restore(len(tokens)))

    def load(self) -> None:
        if not self.loading:
            return
        sequence = self.random.choice(sorted(self.loading))
        tokens, captured = self.loading[sequence]
        parts = list(captured.parts)
        self.random.shuffle(parts)
        late = [parts.pop()] if self.random.random() < 0.3 else []
        for spec, data in parts:
            self.engine.load_part(sequence, spec, data)
        if late:
            self.refuse(StateIncompatibleError, lambda: self.engine.end_restore(sequence))
            self.engine.load_part(sequence, *late[0])
        self.engine.end_restore(sequence)
        del self.loading[sequence]
        self.ready[sequence] = tokens

    def abandon(self) -> None:
        if self.loading:
            sequence = self.random.choice(sorted(self.loading))
            self.engine.free(sequence)
            del self.loading[sequence]

    def bad_step(self) -> None:
        if len(self.ready) < 2:
            return
        one, other = self.random.sample(sorted(self.ready), 2)
        good = Work(one, len(self.ready[one]), (1,))
        start = len(self.ready[other])
        wrong: list[tuple[Refusal, Work]] = [
            (KeyError, Work(10**6, 0, (1,))),
            (ValueError, Work(other, start + 1, (1,))),
            (ValueError, Work(other, start, ())),
            (ValueError, good),
            (TokenOutOfRangeError, Work(other, start, (0, self.engine.facts.vocab_size))),
            (TokenOutOfRangeError, Work(other, start, (-1,))),
        ]
        wrong += [(ValueError, Work(sequence, 0, (1,))) for sequence in self.loading]
        error, bad = self.random.choice(wrong)
        works = [good, bad] if self.random.random() < 0.5 else [bad, good]
        self.refuse(error, lambda: self.engine.step(works))

    def bad_part(self) -> None:
        if self.loading:
            sequence = self.random.choice(sorted(self.loading))
            spec, data = self.random.choice(self.loading[sequence][1].parts)
            self.refuse(StateIncompatibleError, lambda: self.engine.load_part(sequence, spec, data[:-1]))

    def refuse(self, error: Refusal, call: object) -> None:
        """The call raises and changes neither pools nor any sequence."""
        assert callable(call)
        before = self.engine.capacity(), {s: (self.engine.consumed(s), self.digest(s)) for s in self.ready}
        with pytest.raises(error):
            call()
        assert before == (self.engine.capacity(), {s: (self.engine.consumed(s), self.digest(s)) for s in self.ready})
        self.refused += 1

    def digest(self, sequence: int) -> str:
        return state_digest(self.engine, sequence)


@pytest.mark.parametrize("seed", range(4))
def test_random_use_keeps_the_pools_sound_and_every_sequence_exact(make_engine: MakeEngine, seed: int) -> None:
    engine = make_engine(slots=5, pages=14)
    user = RandomUser(engine, random.Random(seed))
    for _ in range(700):
        user.act()
    assert user.refused > 50 and user.captures
    quiet = make_engine(slots=1, pages=14)
    for sequence, tokens in user.ready.items():
        alone = quiet.create()
        consume(quiet, alone, tokens)
        assert capture_digest(quiet.capture(alone)) == capture_digest(engine.capture(sequence))
        quiet.free(alone)
    for sequence in [*user.ready, *user.loading]:
        engine.free(sequence)
    assert engine.check() == []
    empty = engine.capacity()
    assert (empty.slots_free, empty.pages_free) == (empty.slots_total, empty.pages_total)


def test_a_thousand_sessions_come_and_go_without_a_leak(engine: TorchEngine, rng: random.Random) -> None:
    before = engine.capacity()
    for number in range(1000):
        sequence = engine.create()
        if number % 50 == 0:
            consume(engine, sequence, [rng.randrange(90) for _ in range(rng.randint(1, 130))])
        child = engine.fork(sequence) if number % 3 else None
        engine.free(sequence)
        if child is not None:
            engine.free(child)
    assert engine.capacity() == before
    assert engine.check() == []
