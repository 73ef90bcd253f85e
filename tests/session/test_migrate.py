"""A session moves to another node while it runs: its stream goes on, and no token is lost, doubled or different."""

import asyncio
from collections.abc import Sequence

import pytest

from forkpoint.errors import (
    ForkpointError,
    NotFoundError,
    SessionPausedError,
    SessionQuarantinedError,
    SessionRelocatingError,
    StoreUnavailableError,
)
from forkpoint.ids import SessionName
from forkpoint.move_errors import MigrationUnderwayError, MoveFailedError
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import MovePhase
from forkpoint.server.session.live import Place
from forkpoint.statestore.calls import StepCommit, StepOutcome, StepStatus
from forkpoint.statestore.records import CheckpointPolicy, FinishReason, SessionState
from tests.support.hash_engine import HashEngine, continuation
from tests.support.moving import GREEDY, PROMPT, Hold, ends_well, expected, listen, move, nodes, owner_of, speaks
from tests.support.session_site import Site, background, until


async def test_a_running_session_moves_and_its_stream_goes_on(site: Site) -> None:
    first, second = await nodes(site)
    name = await speaks(first)
    stream = listen(site, name, 120)
    await until(lambda: len(stream.tokens) >= 20)
    reports = await move(first, name, second)
    last = reports[-1]
    assert last.phase is MovePhase.MOVED and last.target == second.options.node
    assert last.view is not None and last.view.row.owner == second.node.incarnation
    assert len(stream.tokens) < 120, "it moved while it ran"
    read = await stream.done()
    assert (read.tokens, read.reason) == (continuation(PROMPT, 120, GREEDY)[0], FinishReason.LENGTH)
    assert first.node.counters.moves == second.node.counters.arrivals == 1
    await ends_well(site, name, expected(PROMPT, 120), second)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 130])
async def test_a_move_at_any_place_of_tile_and_page_is_exact(site: Site, length: int) -> None:
    first, second = await nodes(site)
    prompt = [(7 * number + length) % 256 for number in range(length)]
    name = await speaks(first, prompt)
    sample = Sample(0.9, 0, 1.0, 0.0, 11, True)
    stream = listen(site, name, 40, temperature=0.9, seed=11, logprobs=True)
    for source, target in ((first, second), (second, first), (first, second)):
        at = len(stream.tokens)
        await until(lambda at=at: len(stream.tokens) >= min(at + 5, 40))  # type: ignore[misc]
        await move(source, name, target)
    read = await stream.done()
    tokens, logprobs = continuation(prompt, 40, sample)
    assert (read.tokens, read.logprobs) == (tokens, logprobs)
    await ends_well(site, name, [*prompt, *tokens], second)


async def test_a_stop_string_that_began_at_the_source_is_found_by_the_target(site: Site) -> None:
    """Held-back text and stops are functions of the log: wherever the session moves, the same text comes out."""
    first, second = await nodes(site)
    text = bytes(continuation(PROMPT, 200, GREEDY)[0])
    stop = text[90:94]
    end = text.index(stop)
    name = await speaks(first)
    stream = listen(site, name, 200, stop_text=(stop,))
    here, there = first, second
    while stream.read.finished is None and len(stream.tokens) < end:
        await move(here, name, there)
        here, there = there, here
    read = await stream.done()
    assert (read.text, read.reason) == (text[:end], FinishReason.STOP)
    assert read.finished is not None and read.finished.stop_position == len(PROMPT) + end
    await ends_well(site, name, [*PROMPT, *text[: end + len(stop)]])


async def test_nothing_of_the_old_owner_is_committed_after_the_new_ones_first_token(memory_site: Site) -> None:
    """Each commit of a long generation that moves three times, in the order in which the store took them."""
    first, second = await nodes(memory_site)
    committed: list[tuple[int, int]] = []
    inner = memory_site.memory.commit_step

    async def commit_step(commits: Sequence[StepCommit]) -> list[StepOutcome]:
        outcomes = await inner(commits)
        for commit, outcome in zip(commits, outcomes, strict=True):
            if outcome.status is StepStatus.COMMITTED and commit.token_ids:
                committed.append((commit.epoch, outcome.head))
        return outcomes

    memory_site.memory.commit_step = commit_step  # type: ignore[method-assign]
    name = await speaks(first)
    stream = listen(memory_site, name, 120)
    for source, target in ((first, second), (second, first), (first, second)):
        at = len(stream.tokens)
        await until(lambda at=at: len(stream.tokens) > at + 5)  # type: ignore[misc]
        await move(source, name, target)
    await stream.done()
    assert committed == sorted(committed) and [head for _, head in committed] == list(range(72, 192))
    assert {epoch for epoch, _ in committed} == {1, 2, 3, 4}
    await ends_well(memory_site, name, expected(PROMPT, 120), second)
    late = StepCommit(name, 3, len(PROMPT) + 120, (97,), "g-old")
    assert [outcome.status for outcome in await inner([late])] == [StepStatus.STALE_EPOCH]


async def test_turns_go_on_after_a_move(site: Site) -> None:
    """The next append and the next generation find the state at the target, nothing is restored for them."""
    first, second = await nodes(site)
    name = await speaks(first)
    await listen(site, name, 10).done()
    await move(first, name, second)
    restores = second.node.counters.restores
    log = expected(PROMPT, 10)
    await second.append(name, b"go on")
    read = await listen(site, name, 10, "h").done()
    log += b"go on"
    assert read.tokens == continuation(log, 10, GREEDY)[0]
    assert second.node.counters.restores == restores == 1
    await ends_well(site, name, log + read.tokens, second)


async def test_a_move_without_a_target_goes_where_there_is_room(site: Site) -> None:
    first, second, third = await nodes(site, 3)
    for number in range(3):
        busy = await speaks(second, name=f"b{number}")
        await second.idle(busy)
    await until(lambda: any(row.status.sessions == 3 for row in first.node.others))
    name = await speaks(first)
    reports = await move(first, name)
    assert reports[-1].target == third.options.node
    await ends_well(site, name, PROMPT, third)


async def test_a_session_that_is_there_already_is_not_moved_again(site: Site) -> None:
    first, second = await nodes(site)
    name = await speaks(first)
    await move(first, name, second)
    epoch = owner_of(site, name)[1].epoch
    with pytest.raises(SessionRelocatingError) as refused:
        await move(first, name, second)
    assert refused.value.address == second.options.address
    (only,) = await move(second, name, second)
    assert only.phase is MovePhase.MOVED and owner_of(site, name)[1].epoch == epoch


async def test_an_empty_a_parked_and_a_transient_session_move(site: Site) -> None:
    first, second = await nodes(site, slots=1)
    empty = await speaks(first, [], "empty")
    await move(first, empty, second)
    await ends_well(site, empty, [], second)
    parked = await speaks(first, name="parked")
    await first.idle(parked)
    other = await speaks(first, name="other")
    await first.idle(other)
    assert first.node._core.lives[parked].place is Place.PARKED
    await move(first, parked, second)
    await ends_well(site, parked, PROMPT, second)
    read = await listen(site, parked, 10).done()
    assert read.tokens == continuation(PROMPT, 10, GREEDY)[0]


async def test_what_can_not_move_says_why_and_stays(site: Site) -> None:
    first, second = await nodes(site)
    paused = await speaks(first, name="paused")
    await first.node.pause(paused, None)
    with pytest.raises(SessionPausedError):
        await move(first, paused, second)
    gone = await speaks(first, name="gone")
    await first.node.delete_session(gone, None)
    with pytest.raises(NotFoundError):
        await move(first, gone, second)
    sick = await speaks(first, name="sick")
    await first.catalog.release(sick, owner_of(site, sick)[1].epoch, SessionState.QUARANTINED, "it is sick")
    await first.node._core.drop(owner_of(site, sick)[1], NotFoundError("dropped by the test"))
    with pytest.raises(SessionQuarantinedError):
        await move(first, sick, second)
    well = await speaks(first, name="well")
    with pytest.raises(NotFoundError, match="nodes/nowhere"):
        [report async for report in first.node.migrate(well, "nowhere")]
    with pytest.raises(NotFoundError):
        await move(first, SessionName("w", "never"), second)
    await ends_well(site, well, PROMPT, first)


async def test_a_node_that_computes_other_bits_is_no_target(site: Site) -> None:
    (first,) = await nodes(site, 1)
    other = await site.node(HashEngine(numerics_id="hash-2"))
    await until(lambda: len(first.node.others) == 1)
    name = await speaks(first)
    with pytest.raises(MoveFailedError, match=r"hash-2.*hash-1"):
        await move(first, name, other)
    with pytest.raises(MoveFailedError, match="none that could take it"):
        await move(first, name)
    await ends_well(site, name, PROMPT, first)


async def test_a_full_target_refuses_and_the_session_runs_on(site: Site) -> None:
    first, second = await nodes(site, slots=1)
    name, busy = await speaks(first), await speaks(second, name="busy")
    theirs = listen(site, busy, 300, "theirs")
    await until(lambda: len(theirs.tokens) > 3)
    stream = listen(site, name, 60)
    with pytest.raises(MoveFailedError, match="not enough slots"):
        await move(first, name, second)
    assert (await stream.done()).tokens == continuation(PROMPT, 60, GREEDY)[0]
    await ends_well(site, name, expected(PROMPT, 60), first)
    assert len((await theirs.done()).tokens) == 300


async def test_an_idle_session_of_the_target_makes_room(site: Site) -> None:
    first, second = await nodes(site, slots=1)
    name, idle = await speaks(first), await speaks(second, name="idle")
    await second.idle(idle)
    await move(first, name, second)
    await ends_well(site, name, PROMPT, second)
    assert second.node._core.lives[idle].place is Place.PARKED


async def test_an_engine_that_fails_at_the_target_fails_the_move_alone(site: Site) -> None:
    """Without a checkpoint the target has more to replay than it may be behind: it can't do without that step."""
    first, second = await nodes(site)
    name, prompt = await first.session("s", policy=CheckpointPolicy(0)), PROMPT[:40]
    await first.append(name, prompt)
    stream = listen(site, name, 80)
    await until(lambda: len(stream.tokens) > 0)
    second.engine.failures += [RuntimeError("a step fails")]
    with pytest.raises(MoveFailedError, match="a step fails"):
        await move(first, name, second)
    await move(first, name, second)
    assert (await stream.done()).tokens == continuation(prompt, 80, GREEDY)[0]
    await ends_well(site, name, expected(prompt, 80), second)


async def test_only_one_move_at_a_time_is_under_way(site: Site) -> None:
    first, second, third = await nodes(site, 3)
    name = await speaks(first)
    site.street.before["cut_over"] = hold = Hold()
    one = background(move(first, name, second))
    await hold.reached.wait()
    assert (await first.node.get_session(name)).state == "MIGRATING"
    with pytest.raises(MigrationUnderwayError) as refused:
        await move(first, name, third)
    assert refused.value.target == second.node.incarnation
    hold.go_on.set()
    await one
    await ends_well(site, name, PROMPT, second)


async def test_a_move_whose_caller_goes_away_is_cancelled(site: Site) -> None:
    first, second = await nodes(site)
    name = await speaks(first)
    stream = listen(site, name, 60)
    await until(lambda: len(stream.tokens) > 3)
    second.engine.step_pause = 0.2
    reports = first.node.migrate(name, second.options.node)
    assert (await anext(reports)).phase is MovePhase.RESTORING
    await reports.aclose()
    await until(lambda: not first.node._core.lives[name].moving)
    assert (await stream.done()).tokens == continuation(PROMPT, 60, GREEDY)[0]
    second.engine.step_pause = 0
    await ends_well(site, name, expected(PROMPT, 60), first)


async def test_a_caller_that_goes_away_during_the_cut_over_changes_nothing(site: Site) -> None:
    first, second = await nodes(site)
    name = await speaks(first)
    site.street.before["cut_over"] = hold = Hold()
    task = background(move(first, name, second))
    await hold.reached.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    hold.go_on.set()
    await until(lambda: name in second.node._core.lives)
    await ends_well(site, name, PROMPT, second)


async def test_a_generation_that_ends_during_the_move_has_ended(site: Site) -> None:
    first, second = await nodes(site)
    name = await speaks(first)
    stream = listen(site, name, 12)
    await move(first, name, second)
    read = await stream.done()
    assert (read.tokens, read.reason) == (continuation(PROMPT, 12, GREEDY)[0], FinishReason.LENGTH)
    await ends_well(site, name, expected(PROMPT, 12), second)


async def test_what_another_move_left_behind_is_taken_back(site: Site) -> None:
    """A begin that took effect long after its caller gave up names a migration that nobody carries out."""
    first, second = await nodes(site)
    name = await speaks(first)
    epoch = owner_of(site, name)[1].epoch
    await first.catalog.begin_migration(name, epoch, "m-late", second.node.incarnation)
    await move(first, name, second)
    await ends_well(site, name, PROMPT, second)


async def test_the_answer_of_the_cut_over_is_lost_and_the_session_is_there(site: Site) -> None:
    first, second = await nodes(site)
    name = await speaks(first)
    stream = listen(site, name, 60)
    site.street.lost["cut_over"] = 1
    await move(first, name, second)
    assert (await stream.done()).tokens == continuation(PROMPT, 60, GREEDY)[0]
    await ends_well(site, name, expected(PROMPT, 60), second)


async def test_a_cut_over_that_arrives_late_fails_and_the_source_goes_on(site: Site) -> None:
    """The source waits no longer and takes its word back; what arrives afterwards finds it gone."""
    first, second = await nodes(site)
    name = await speaks(first)
    stream = listen(site, name, 60)
    await until(lambda: len(stream.tokens) > 3)
    site.street.late["cut_over"] = arrives = asyncio.Event()
    moving = background(move(first, name, second))
    await until(lambda: site.street.calls.count("cut_over") == 2)
    late = list(site.street.tasks)
    arrives.set()
    await moving
    refused = await asyncio.gather(*late, return_exceptions=True)
    assert [error for error in refused if isinstance(error, ForkpointError)], "the late one was refused"
    assert (await stream.done()).tokens == continuation(PROMPT, 60, GREEDY)[0]
    await ends_well(site, name, expected(PROMPT, 60), second)
    assert owner_of(site, name)[1].epoch == 2, "there was one cut-over"


async def test_a_partition_during_the_cut_over_leaves_one_owner(site: Site) -> None:
    first, second = await nodes(site)
    name = await speaks(first)
    stream = listen(site, name, 60)
    await until(lambda: len(stream.tokens) > 3)

    async def cut() -> None:
        site.street.cut.add(second.options.address)

    site.street.after["cut_over"] = cut
    await move(first, name, second)
    site.street.cut.clear()
    assert (await stream.done()).tokens == continuation(PROMPT, 60, GREEDY)[0]
    await ends_well(site, name, expected(PROMPT, 60), second)


@pytest.mark.parametrize("answer", ["never", "lost"])
@pytest.mark.parametrize("place", ["source", "target"])
async def test_a_store_that_is_away_during_the_cut_over_leaves_one_owner(site: Site, place: str, answer: str) -> None:
    first, second = await nodes(site)
    name = await speaks(first)
    stream = listen(site, name, 200)
    await until(lambda: len(stream.tokens) > 3)
    away = StoreUnavailableError("catalog", "it is away")
    node = first if place == "source" else second
    methods = ("end_migration", "cut_over", "open_generation", "get_session", "commit_step")

    async def break_off() -> None:
        for method in methods:
            if answer == "never":
                node.faults.before[method] = away
            else:
                node.faults.lost[method] = 2
        if place == "source":
            site.street.lost["cut_over"] = 1

    site.street.before["cut_over"] = break_off
    moving = background(move(first, name, second))
    await until(lambda: site.street.calls.count("cut_over") >= 1)
    await asyncio.sleep(0.05)
    node.faults.heal()
    await asyncio.gather(moving, return_exceptions=True)
    assert (await stream.done()).tokens == continuation(PROMPT, 200, GREEDY)[0]
    await ends_well(site, name, expected(PROMPT, 200))
