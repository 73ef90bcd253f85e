"""plan_step: its bounds, its order, its fairness and what it does when pages run short."""

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.limits import PAGE_TOKENS
from forkpoint.server.scheduler.history import History
from forkpoint.server.scheduler.policy import (
    BACKGROUND_PATIENCE_STEPS,
    Candidate,
    Idle,
    StepLimits,
    StepPlan,
    chunk_end,
    pages_for,
    plan_step,
)

PLENTY = 10_000


def candidate(key: str, consumed: int, head: int, wants_sample: bool = False, **other: object) -> Candidate[str]:
    fields = {"workflow": "w", "checkpoint_every": 0, "admitted": sum(key.encode()), **other}
    return Candidate(key, consumed=consumed, head=head, wants_sample=wants_sample, **fields)  # type: ignore[arg-type]


@st.composite
def populations(draw: st.DrawFn) -> list[Candidate[str]]:
    count = draw(st.integers(0, 12))
    out = []
    for number in range(count):
        consumed = draw(st.integers(0, 300))
        backlog = draw(st.one_of(st.integers(0, 2), st.integers(0, 2000)))
        out.append(
            Candidate(
                key=f"s{number}",
                workflow=draw(st.sampled_from("abc")),
                consumed=consumed,
                head=consumed + backlog,
                wants_sample=draw(st.booleans()),
                checkpoint_every=draw(st.sampled_from([0, 16, 48, 512])),
                admitted=number,
            )
        )
    return out


limits_ = st.builds(
    StepLimits,
    pages_free=st.one_of(st.integers(0, 3), st.just(PLENTY)),
    prefill_tokens=st.integers(1, 700),
    sequences=st.integers(2, 16),
)


@given(populations(), limits_)
@settings(max_examples=300, deadline=None)
def test_a_plan_stays_within_every_bound(population: list[Candidate[str]], limits: StepLimits) -> None:
    plan = plan_step(population, limits, History())
    by_key = {c.key: c for c in population}
    assert len(plan.shares) == len({share.key for share in plan.shares}) <= limits.sequences
    prefilled = pages = 0
    for share in plan.shares:
        c = by_key[share.key]
        end = share.start + share.count
        assert share.start == c.consumed and end <= c.head
        assert share.count > 0 or share.sample
        assert not share.sample or (c.wants_sample and end == c.head)
        if c.checkpoint_every and share.count > 1:
            assert end <= (share.start // c.checkpoint_every + 1) * c.checkpoint_every
        pages += pages_for(end) - pages_for(share.start)
        if not (c.wants_sample and c.head - c.consumed <= 1):
            prefilled += share.count
    assert pages <= limits.pages_free
    assert prefilled <= limits.prefill_tokens


@given(populations(), limits_, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_a_plan_depends_on_nothing_but_its_arguments(
    population: list[Candidate[str]], limits: StepLimits, shuffler: random.Random
) -> None:
    history = plan_step(population, limits, History()).history
    idle = [Idle(f"i{n}", 64 * n, n) for n in range(3)]
    expected = plan_step(population, limits, history, idle)
    shuffled, shuffled_idle = list(population), list(idle)
    shuffler.shuffle(shuffled)
    shuffler.shuffle(shuffled_idle)
    assert plan_step(shuffled, limits, history, shuffled_idle) == expected


@given(populations(), limits_)
@settings(max_examples=200, deadline=None)
def test_decoding_comes_first(population: list[Candidate[str]], limits: StepLimits) -> None:
    plan = plan_step(population, limits, History())
    by_key = {c.key: c for c in population}
    decodes = [by_key[s.key].wants_sample and by_key[s.key].head - s.start <= 1 for s in plan.shares]
    assert decodes == sorted(decodes, reverse=True)


@given(populations())
@settings(max_examples=100, deadline=None)
def test_with_room_for_all_every_decoding_session_is_served(population: list[Candidate[str]]) -> None:
    plan = plan_step(population, StepLimits(pages_free=PLENTY), History())
    served = {share.key for share in plan.shares if share.sample}
    assert served >= {c.key for c in population if c.wants_sample and c.head - c.consumed <= 1}
    assert not plan.blocked and not plan.park


def test_a_chunk_ends_at_every_checkpoint_position() -> None:
    consumed, ends = 0, []
    while consumed < 1200:
        consumed = chunk_end(consumed, 1200, 400, 512)
        ends.append(consumed)
    assert ends == [400, 512, 912, 1024, 1200]


def test_a_prompt_that_ends_on_a_checkpoint_position_takes_no_empty_chunk() -> None:
    for head in (511, 512, 513):
        consumed, ends = 0, []
        while consumed < head:
            consumed = chunk_end(consumed, head, 512, 512)
            ends.append(consumed)
        assert ends == ([head] if head <= 512 else [512, 513])


def test_a_session_at_its_head_samples_again_without_consuming() -> None:
    plan = plan_step([candidate("a", 5, 5, True)], StepLimits(pages_free=0), History())
    assert [(s.start, s.count, s.sample) for s in plan.shares] == [(5, 0, True)]


def test_a_session_that_wants_nothing_gets_nothing() -> None:
    plan = plan_step([candidate("a", 5, 5)], StepLimits(pages_free=9), History())
    assert plan.shares == () and plan.blocked == ()


def test_a_generation_waiting_for_its_prompt_goes_before_background_prefill() -> None:
    population = [candidate("a", 0, 1000), candidate("b", 0, 1000, True)]
    plan = plan_step(population, StepLimits(pages_free=PLENTY, prefill_tokens=100), History())
    assert [share.key for share in plan.shares] == ["b"]


def test_background_prefill_is_served_after_its_patience() -> None:
    history: History[str] = History()
    served_at = None
    consumed = 0
    for step in range(30):
        population = [candidate("background", 0, 1000), candidate("foreground", consumed, 10**6, True)]
        plan = plan_step(population, StepLimits(pages_free=10**6, prefill_tokens=64), history)
        history = plan.history
        for share in plan.shares:
            if share.key == "background" and served_at is None:
                served_at = step
            elif share.key == "foreground":
                consumed += share.count
    assert served_at is not None and served_at <= BACKGROUND_PATIENCE_STEPS + 2


def test_a_workflow_with_many_sessions_gets_no_more_than_one_with_a_single_session() -> None:
    history: History[str] = History()
    consumed: dict[str, int] = defaultdict(int)
    workflows = {f"many{n}": "crowd" for n in range(9)} | {"alone": "single"}
    tokens: dict[str, int] = defaultdict(int)
    for _ in range(60):
        population = [
            candidate(key, consumed[key], 10**6, True, workflow=workflow, admitted=number)
            for number, (key, workflow) in enumerate(workflows.items())
        ]
        plan = plan_step(population, StepLimits(pages_free=10**6, prefill_tokens=100), history)
        history = plan.history
        for share in plan.shares:
            consumed[share.key] += share.count
            tokens[workflows[share.key]] += share.count
    assert tokens["crowd"] == tokens["single"]
    crowd = [consumed[key] for key in workflows if key != "alone"]
    assert max(crowd) - min(crowd) <= 100


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_nobody_starves_while_sessions_come_and_go(seed: int) -> None:
    random_ = random.Random(seed)
    limits = StepLimits(pages_free=10**6, prefill_tokens=random_.choice([16, 100]), sequences=random_.choice([2, 3, 5]))
    live: dict[str, Candidate[str]] = {}
    unserved: dict[str, int] = {}
    history: History[str] = History()
    arrivals = 0
    for _ in range(150):
        while len(live) < 12 and random_.random() < 0.7:
            arrivals += 1
            consumed = random_.randrange(100)
            head = consumed + random_.choice([0, 1, 1, 30, 400])
            wants = head == consumed or random_.random() < 0.7
            live[f"s{arrivals}"] = Candidate(
                f"s{arrivals}", random_.choice("abc"), consumed, head, wants, 64, admitted=arrivals
            )
        plan = plan_step(list(live.values()), limits, history)
        history = plan.history
        served = {share.key: share for share in plan.shares}
        for key, c in list(live.items()):
            unserved[key] = 0 if key in served else unserved.get(key, 0) + 1
            # Patience, then its workflow's turn (of three) and its own among at most twelve.
            assert unserved[key] <= BACKGROUND_PATIENCE_STEPS + 3 * 12
            if key in served:
                end = served[key].start + served[key].count
                if served[key].sample and random_.random() < 0.9:
                    live[key] = Candidate(key, c.workflow, end, end + 1, True, 64, c.admitted)
                elif end < c.head:
                    live[key] = Candidate(key, c.workflow, end, c.head, c.wants_sample, 64, c.admitted)
                else:
                    del live[key], unserved[key]


def test_prefill_is_not_shut_out_by_more_decoders_than_a_step_holds() -> None:
    population = [candidate(f"d{n}", 5, 6, True, admitted=n) for n in range(8)]
    population.append(candidate("prompt", 0, 100, True, admitted=99))
    plan = plan_step(population, StepLimits(pages_free=PLENTY, sequences=4), History())
    assert [share.key for share in plan.shares][3] == "prompt"


def test_decoders_beyond_a_steps_places_take_turns() -> None:
    history: History[str] = History()
    counts: dict[str, int] = defaultdict(int)
    for _ in range(12):
        population = [candidate(f"d{n}", 5, 6, True, admitted=n) for n in range(6)]
        plan = plan_step(population, StepLimits(pages_free=PLENTY, sequences=2), history)
        history = plan.history
        for share in plan.shares:
            counts[share.key] += 1
    assert set(counts.values()) == {4}


def test_a_prefill_chunk_shrinks_to_the_pages_that_are_left() -> None:
    plan = plan_step([candidate("a", 10, 1000)], StepLimits(pages_free=2), History())
    assert plan.shares[0].count == 3 * PAGE_TOKENS - 10


def test_when_pages_run_out_the_longest_unused_idle_session_is_parked_first() -> None:
    idle = [Idle("recent", 64, 9), Idle("old", 64, 1), Idle("empty", 0, 0)]
    plan = plan_step([candidate("a", 64, 65, True)], StepLimits(pages_free=0), History(), idle)
    assert plan.shares == () and plan.blocked == ("a",) and plan.park == ("old",)


def test_without_idle_sessions_the_youngest_is_parked_and_never_an_older_one() -> None:
    population = [candidate(name, 64, 65, True, admitted=n) for n, name in enumerate(["oldest", "middle", "youngest"])]
    plan = plan_step(population, StepLimits(pages_free=0), History())
    assert plan.blocked == ("oldest", "middle", "youngest") and plan.park == ("youngest",)


def test_a_session_that_cannot_fit_alone_is_blocked_with_nobody_to_park() -> None:
    plan: StepPlan[str] = plan_step([candidate("a", 64, 65, True)], StepLimits(pages_free=0), History())
    assert plan.blocked == ("a",) and plan.park == () and plan.shares == ()


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_under_page_pressure_every_session_finishes(seed: int) -> None:
    """Parked sessions come back when there is room; sessions that park each other in turn would never end."""
    random_ = random.Random(seed)
    total = random_.randrange(4, 8)
    goals = {f"s{n}": random_.randrange(1, total * PAGE_TOKENS + 1) for n in range(5)}
    consumed = dict.fromkeys(goals, 0)
    resident: dict[str, int] = {}
    history: History[str] = History()
    admissions = 0
    for _ in range(4000):
        if not goals:
            return
        free = total - sum(pages_for(consumed[key]) for key in resident)
        for key in sorted(goals):
            if key not in resident and pages_for(consumed[key] + 1) <= free:
                admissions += 1
                resident[key] = admissions
                free -= pages_for(consumed[key])
        population = [
            candidate(key, consumed[key], min(goals[key], consumed[key] + 100), True, admitted=admitted)
            for key, admitted in resident.items()
        ]
        plan = plan_step(population, StepLimits(pages_free=free, prefill_tokens=50), history)
        history = plan.history
        assert plan.shares or plan.park
        for share in plan.shares:
            consumed[share.key] = share.start + share.count
            if consumed[share.key] == goals[share.key]:
                del goals[share.key], resident[share.key]
        for key in plan.park:
            resident.pop(key, None)
    pytest.fail(f"still unfinished after 4000 steps: {goals}")


def test_a_caller_who_lists_a_session_twice_is_told() -> None:
    with pytest.raises(ValueError, match="same key"):
        plan_step([candidate("a", 0, 1), candidate("a", 0, 1)], StepLimits(pages_free=1), History())
    with pytest.raises(ValueError, match="beyond the head"):
        plan_step([candidate("a", 2, 1)], StepLimits(pages_free=1), History())
    with pytest.raises(ValueError, match="out of range"):
        StepLimits(pages_free=1, sequences=1)


def test_the_history_forgets_sessions_that_are_gone_and_keeps_their_workflows_turn() -> None:
    first = plan_step([candidate("a", 0, 10, True)], StepLimits(pages_free=9), History())
    second = plan_step([candidate("b", 0, 10, True, workflow="v")], StepLimits(pages_free=9), first.history)
    assert set(second.history.waiting_since) == {"b"}
    assert {workflow for workflow, _ in second.history.turns} == {"w", "v"}
