"""Forks and rewinds: branches never see each other, and an image spares the children the restore."""

import asyncio
import random
import threading

import pytest

from forkpoint.errors import (
    AbortedError,
    AlreadyExistsError,
    InvalidFieldError,
    NotFoundError,
    PositionBeyondHeadError,
    StoreFullError,
    UnavailableError,
)
from forkpoint.ids import SessionName
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import CreateSession, ForkCall, GenerateCall
from forkpoint.server.session.seeds import child_seed, derive_seed
from forkpoint.statestore.calls import AppendTokens
from forkpoint.statestore.records import CheckpointPolicy, FinishReason, LogSlice, SessionState
from tests.support.hash_engine import HashEngine, continuation
from tests.support.session_site import PATIENCE_SECONDS, Running, Site, background, key, until

PROMPT = list(b"two roads diverged in a yellow wood")
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)


async def test_children_of_a_fork_at_the_head_start_from_one_image(node: Running) -> None:
    name = await node.session("s", policy=CheckpointPolicy(0))
    await node.append(name, PROMPT)
    await node.idle(name)
    children = await node.fork(name, "a", "b", "c")
    await node.append(name, b"the parent goes on")
    await node.generate(GenerateCall(name, key("p"), max_tokens=20))
    for number, child in enumerate(children):
        await node.append(child, [number])
        read = await node.generate(GenerateCall(child, key(f"g{number}"), max_tokens=30))
        sample = Sample(0.0, 0, 1.0, 0.0, derive_seed(7, child.session))
        assert read.tokens == continuation([*PROMPT, number], 30, sample)[0]
    counters = node.node.counters
    assert (counters.fork_images, counters.fork_images_used, counters.restores) == (1, 3, 1)
    assert await node.log(name) == [*PROMPT, *b"the parent goes on", *(await node.log(name))[-20:]]


async def test_a_fork_in_the_middle_of_a_generation_takes_committed_tokens_only(node: Running) -> None:
    name = await node.session("s")
    node.engine.step_pause = 0.002
    await node.append(name, PROMPT)
    read, task = node.reading(GenerateCall(name, key("g"), max_tokens=90))
    await until(lambda: len(read.tokens) > 10)
    views, position = await node.node.fork(ForkCall(name, 2, session_ids=("a", "b"), seeds="inherit"))
    assert views[0].row.head == position and views[0].row.parent == name
    child = await node.generate(GenerateCall(views[0].row.name, key("c"), max_tokens=20))
    await task
    whole = continuation(PROMPT, 90, GREEDY)[0]
    assert read.tokens == whole, "the parent never paused nor changed"
    at = position - len(PROMPT)
    assert child.tokens == whole[at : at + 20]
    assert node.node.counters.fork_images_used == 1


async def test_a_fork_below_the_head_restores_like_anyone(site: Site) -> None:
    node = await site.node()
    await node.workflow()
    name = await node.session("s", policy=CheckpointPolicy(16))
    node.engine.step_pause = 0.01
    await node.append(name, PROMPT * 3)
    await node.idle(name)
    node.engine.step_pause = 0.0
    for position in (0, 1, 15, 16, 17, 50, 64, 104):
        child = (await node.fork(name, f"c{position}", position=position))[0]
        await node.append(child, [9])
        read = await node.generate(GenerateCall(child, key(f"g{position}"), max_tokens=5))
        assert read.tokens == continuation([*(PROMPT * 3)[:position], 9], 5, GREEDY)[0]
    assert node.node.counters.restored_tokens > 0


async def test_one_child_inherits_the_seed_and_more_derive_theirs(node: Running) -> None:
    name = await node.session("s", seed=1234)
    await node.append(name, PROMPT)
    one, _ = await node.node.fork(ForkCall(name, 1))
    assert one[0].row.seed == 1234
    two, _ = await node.node.fork(ForkCall(name, 2))
    seeds = {view.row.name.session: view.row.seed for view in two}
    assert seeds == {child: derive_seed(1234, child) for child in seeds} and len(set(seeds.values())) == 2
    assert child_seed("derive", 1, "x", 1) == derive_seed(1, "x") and child_seed("inherit", 1, "x", 9) == 1


async def test_a_fork_is_made_once_for_a_request_id(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    call = ForkCall(name, 3, request=key("f"))
    results = await asyncio.gather(*(node.node.fork(call) for _ in range(4)))
    names = [[view.row.name for view in views] for views, _ in results]
    assert all(result == names[0] for result in names)
    assert len(await node.node.list_sessions("w", None, 100, False)) == 4


async def test_a_fork_that_fails_leaves_the_parent_open_and_no_child(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.session("taken")
    with pytest.raises(AlreadyExistsError):
        await node.fork(name, "new", "taken")
    with pytest.raises(PositionBeyondHeadError):
        await node.fork(name, "new", position=len(PROMPT) + 1)
    for call in (ForkCall(name, 0), ForkCall(name, 1025), ForkCall(name, 2, session_ids=("x",)), ForkCall(name, 1, -1)):
        with pytest.raises(InvalidFieldError):
            await node.node.fork(call)
    node.faults.fill()
    with pytest.raises(StoreFullError):
        await node.fork(name, "new")
    node.faults.heal()
    assert len(await node.node.list_sessions("w", None, 100, False)) == 2
    read = await node.generate(GenerateCall(name, key("g"), max_tokens=9))
    assert read.tokens == continuation(PROMPT, 9, GREEDY)[0]
    await node.node.delete_session(name, None)
    with pytest.raises(NotFoundError):
        await node.fork(name, "late")
    await until(lambda: node.engine.sequences == {})


async def test_children_outlive_their_parent(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.idle(name)
    child = (await node.fork(name, "child"))[0]
    await node.node.delete_session(name, None)
    read = await node.generate(GenerateCall(child, key("g"), max_tokens=12))
    assert read.tokens == continuation(PROMPT, 12, GREEDY)[0]


async def test_an_image_goes_when_its_children_go_and_when_room_is_short(site: Site) -> None:
    node = await site.node(HashEngine(slots=3))
    await node.workflow()
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.idle(name)
    children = await node.fork(name, "a", "b")
    assert len(node.engine.sequences) == 2
    for child in children:
        await node.node.delete_session(child, None)
    await until(lambda: len(node.engine.sequences) == 1)
    (kept,) = await node.fork(name, "c")
    for number in range(3):
        other = await node.session(f"o{number}")
        await node.append(other, [number])
        await node.generate(GenerateCall(other, key(f"g{number}"), max_tokens=3))
    assert node.node.counters.fork_images_dropped == 2
    read = await node.generate(GenerateCall(kept, key("g"), max_tokens=8))
    assert read.tokens == continuation(PROMPT, 8, GREEDY)[0]


async def test_rewind_takes_back_what_came_after(node: Running) -> None:
    name = await node.session("s", policy=CheckpointPolicy(16))
    await node.append(name, PROMPT)
    first = await node.generate(GenerateCall(name, key("g"), max_tokens=40))
    for position in (len(PROMPT) + 40, len(PROMPT) + 20, 32, 10):
        view = await node.node.rewind(name, position, key(f"r{position}"))
        assert view.row.head == position
        again = await node.node.rewind(name, position, key(f"r{position}"))
        assert again.row.branch == view.row.branch
        assert await node.log(name) == (PROMPT + first.tokens)[:position]
    read = await node.generate(GenerateCall(name, key("h"), max_tokens=25))
    assert read.tokens == continuation(PROMPT[:10], 25, GREEDY)[0]
    with pytest.raises(PositionBeyondHeadError):
        await node.node.rewind(name, 36, None)
    with pytest.raises(InvalidFieldError):
        await node.node.rewind(name, -1, None)
    with pytest.raises(AbortedError):
        await node.generate(GenerateCall(name, key("g"), max_tokens=40))


async def test_rewind_ends_a_running_generation_but_a_wrong_rewind_does_not(node: Running) -> None:
    name = await node.session("s")
    node.engine.step_pause = 0.002
    await node.append(name, PROMPT)
    read, task = node.reading(GenerateCall(name, key("g")))
    await until(lambda: len(read.tokens) > 5)
    with pytest.raises(PositionBeyondHeadError):
        await node.node.rewind(name, 4000, None)
    await node.node.rewind(name, len(PROMPT), None)
    await asyncio.gather(task, return_exceptions=True)
    assert read.reason in (FinishReason.CANCELLED, None)
    node.engine.step_pause = 0.0
    again = await node.generate(GenerateCall(name, key("h"), max_tokens=10))
    assert again.tokens == continuation(PROMPT, 10, GREEDY)[0]


async def test_a_follower_of_a_rewound_session_is_told(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    follower = node.node.read_tokens(name, 0, None, True)
    await anext(follower)
    await node.node.rewind(name, 3, None)
    with pytest.raises(AbortedError):
        async with asyncio.timeout(5):
            await anext(follower)


@pytest.mark.parametrize("slots", [2, 16])
async def test_random_trees_match_a_plain_model(site: Site, rng: random.Random, slots: int) -> None:
    """Appends, generations, forks, rewinds, pauses, crashes at random, against lists."""
    node = await site.node(HashEngine(slots=slots))
    await node.workflow()
    model: dict[SessionName, list[int]] = {await node.session("root", policy=CheckpointPolicy(32)): []}
    seeds = dict.fromkeys(model, 7)
    for number in range(90):
        name = rng.choice(list(model))
        log = model[name]
        act = rng.choice(["append", "append", "generate", "generate", "fork", "rewind", "pause", "delete", "crash"])
        if act == "append":
            tokens = [rng.randrange(256) for _ in range(rng.randrange(1, 40))]
            await node.append(name, tokens)
            log += tokens
        elif act == "generate" and log:
            count = rng.randrange(1, 25)
            read = await node.generate(GenerateCall(name, key(f"g{number}"), max_tokens=count, temperature=0.5))
            assert read.tokens == continuation(log, count, Sample(0.5, 0, 1.0, 0.0, seeds[name]))[0]
            log += read.tokens
        elif act == "fork" and len(model) < 12:
            position = rng.choice([len(log), rng.randrange(len(log) + 1)])
            views, at = await node.node.fork(ForkCall(name, rng.randrange(1, 4), position))
            assert at == position
            for view in views:
                model[view.row.name], seeds[view.row.name] = log[:position], view.row.seed
        elif act == "rewind":
            position = rng.randrange(max(0, len(log) - 30), len(log) + 1)
            await node.node.rewind(name, position, None)
            del log[position:]
        elif act == "pause":
            await node.node.pause(name, None)
            await node.node.resume(name, None)
        elif act == "delete" and len(model) > 3:
            await node.node.delete_session(name, None)
            del model[name]
        elif act == "crash" and rng.random() < 0.4:
            await node.crash()
            node = await site.node(HashEngine(slots=slots))
    for name, log in model.items():
        assert await node.log(name) == log
    views = await node.node.list_sessions("w", None, 100, False)
    assert {view.row.name: view.row.head for view in views} == {name: len(log) for name, log in model.items()}


async def test_children_of_a_parent_that_this_node_lost_unknowingly_are_what_the_store_says(node: Running) -> None:
    """The parent's state here is of a branch that its new owner left."""
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.idle(name)
    epoch = (await node.node.get_session(name)).row.epoch + 1
    await node.catalog.acquire(name, "thief", epoch - 1)
    await node.catalog.rewind(name, epoch, 16)
    other = list(b"something else altogether, and at least as long")
    await node.catalog.append(AppendTokens(name, epoch, tuple(other)))
    log = [*PROMPT[:16], *other]
    children = await node.fork(name, "a", "b")
    for child in children:
        read = await node.generate(GenerateCall(child, key(child.session), max_tokens=9))
        assert read.tokens == continuation(log, 9, GREEDY)[0]


async def test_a_parent_that_begins_to_run_while_it_is_forked_gives_no_torn_image(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.node.pause(name, None)
    node.faults.gates["fork"] = gate = asyncio.Event()
    forking = background(node.fork(name, "child", position=len(PROMPT)))
    await until(lambda: "fork" in node.faults.waiting)
    await node.node.resume(name, None)
    node.engine.step_pause = 0.05
    await node.append(name, list(range(120)))
    await asyncio.sleep(0.02)
    gate.set()
    (child,) = await forking
    node.engine.step_pause = 0.0
    read = await node.generate(GenerateCall(child, key("c"), max_tokens=9))
    assert read.tokens == continuation(PROMPT, 9, GREEDY)[0]


async def test_a_fork_reads_no_log_that_was_counted_before_and_the_rest_once(
    memory: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = memory
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.generate(GenerateCall(name, key("g"), max_tokens=10))
    reads: list[tuple[int, int]] = []
    read_log = node.catalog.read_log

    async def counted(session: SessionName, start: int, limit: int) -> LogSlice:
        reads.append((start, limit))
        return await read_log(session, start, limit)

    monkeypatch.setattr(node.catalog, "read_log", counted)
    views, position = await node.node.fork(ForkCall(name, 20))
    assert (position, reads) == (45, [])
    assert {(view.usage.prompt_tokens, view.usage.generated_tokens) for view in views} == {(35, 10)}
    await node.append(name, b"more")
    await node.node.fork(ForkCall(name, 20))
    assert reads == [(45, 4)]
    views, _ = await node.node.fork(ForkCall(name, 20, 40))
    assert reads == [(45, 4), (0, 40)]
    assert {(view.usage.prompt_tokens, view.usage.generated_tokens) for view in views} == {(35, 5)}


async def test_a_fork_at_the_head_keeps_its_point_in_the_background(node: Running) -> None:
    name = await node.session("s", policy=CheckpointPolicy(4096))
    await node.append(name, PROMPT)
    await node.idle(name)
    node.faults.gates["put_checkpoint"] = asyncio.Event()
    await node.fork(name, "a", "b")
    await until(lambda: "put_checkpoint" in node.faults.waiting)
    await node.fork(name, "c", position=len(PROMPT))
    assert node.engine.captures == 1, "the point is on its way already"
    node.faults.gates.pop("put_checkpoint").set()
    await until(lambda: node.node.counters.checkpoints_written == 1)
    (kept,) = await node.node.list_checkpoints(name)
    assert (kept.row.grid_position, kept.row.automatic) == (32, True)
    await node.fork(name, "d")
    await node.generate(GenerateCall(name, key("g"), max_tokens=3))
    assert node.engine.captures == 1 and len(await node.node.list_checkpoints(name)) == 1


async def test_a_fork_keeps_no_point_when_the_session_wants_none_or_when_it_is_not_of_the_head(node: Running) -> None:
    never = await node.session("never", policy=CheckpointPolicy(0))
    passing = (await node.node.create_session(CreateSession(SessionName("w", "passing"), 7, transient=True))).row.name
    lower = await node.session("lower", policy=CheckpointPolicy(4096))
    for name in (never, passing, lower):
        await node.append(name, PROMPT[:30])
        await node.idle(name)
        await node.fork(name, f"{name.session}-child", position=17 if name == lower else None)
    await node.generate(GenerateCall(never, key("g"), max_tokens=3))
    assert node.engine.captures == 0


async def test_a_point_that_can_not_be_kept_costs_the_fork_nothing(node: Running) -> None:
    name = await node.session("s", policy=CheckpointPolicy(4096))
    await node.append(name, PROMPT)
    await node.idle(name)
    node.faults.before["put_checkpoint"] = StoreFullError("catalog", "no space left on device")
    (child,) = await node.fork(name, "a")
    await until(lambda: node.node.counters.checkpoints_failed == 1)
    node.faults.heal()
    assert (await node.generate(GenerateCall(child, key("g"), max_tokens=3))).tokens
    await node.fork(name, "b")
    await until(lambda: node.node.counters.checkpoints_written == 1)


async def test_a_child_that_another_owner_rewound_does_not_start_from_its_parents_image(node: Running) -> None:
    """It is shorter than the state in the image."""
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.idle(name)
    (child,) = await node.fork(name, "child")
    await node.catalog.acquire(child, "elsewhere", 0)
    await node.catalog.rewind(child, 1, 20)
    await node.catalog.release(child, 1, SessionState.ACTIVE)
    read = await node.generate(GenerateCall(child, key("c"), max_tokens=9))
    sample = Sample(0.0, 0, 1.0, 0.0, derive_seed(7, "child"))
    assert read.tokens == continuation(PROMPT[:20], 9, sample)[0]
    assert node.node.counters.fork_images_used == 0
    assert len(node.engine.sequences) == 2


async def test_a_parent_may_leave_the_node_while_its_image_is_made(memory: Running) -> None:
    name = await memory.session("s")
    await memory.append(name, PROMPT)
    await memory.idle(name)
    entered, go_on, fork = threading.Event(), threading.Event(), memory.engine.fork

    def slow_fork(sequence: int) -> int:
        entered.set()
        go_on.wait(PATIENCE_SECONDS)
        return fork(sequence)

    memory.engine.fork = slow_fork  # type: ignore[method-assign]
    forking = background(memory.fork(name, "child"))
    await until(entered.is_set)
    core = memory.node._core
    leaving = background(core.drop(core.lives[name], UnavailableError("it left")))
    await until(lambda: name not in core.lives)
    go_on.set()
    (child,) = await forking
    await leaving
    read = await memory.generate(GenerateCall(child, key("g"), max_tokens=10, seed=7))
    assert read.tokens == continuation(PROMPT, 10, GREEDY)[0]
    assert memory.node.counters.fork_images_used == 1
