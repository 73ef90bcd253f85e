"""Export and import, labels, expiry, usage: the rest of a session's life."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from forkpoint.errors import (
    AlreadyExistsError,
    EtagMismatchError,
    InvalidFieldError,
    LogCorruptError,
    StateIncompatibleError,
    StoreFullError,
    TokenOutOfRangeError,
)
from forkpoint.ids import SessionName
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import CreateSession, GenerateCall, Input, Usage
from forkpoint.statestore.calls import AppendOutcome, AppendTokens
from forkpoint.statestore.records import CheckpointPolicy, LogSlice
from tests.support.hash_engine import HashEngine, continuation
from tests.support.session_site import FAST, Running, Site, key, until

PROMPT = list(b"take me with you")
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)


async def source(node: Running) -> SessionName:
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.generate(GenerateCall(name, key("g"), max_tokens=30, logprobs=True))
    await node.append(name, b"and then")
    await node.generate(GenerateCall(name, key("h"), max_tokens=11, stop_ids=(300 - 40,)))
    await node.generate(GenerateCall(name, key("k"), Input(token_ids=(1, 2)), max_tokens=3))
    return name


async def again(slices: list[LogSlice]) -> AsyncIterator[LogSlice]:
    for part in slices:
        yield part


async def test_an_import_is_the_session_that_was_exported(node: Running) -> None:
    name = await source(node)
    head = await node.node.export_head(name)
    slices = [part async for part in node.node.export_log(name)]
    copy = SessionName("w", "copy")
    view = await node.node.import_session(copy, head, again(slices), key("i"))
    assert (view.row.head, view.row.head_hash, view.row.seed) == (head.row.head, head.row.head_hash, 7)
    copied = [part async for part in node.node.export_log(copy)]
    assert copied == slices, "kinds and logprobs too"
    theirs = (await node.node.export_head(copy)).generations
    assert len(theirs) == 3 and theirs[2].input_start == 65
    for ours, imported in zip(head.generations, theirs, strict=True):
        same = replace(imported, generation=ours.generation, session=ours.session, branch=ours.branch)
        assert same == ours
    replayed = await node.node.import_session(copy, head, again(slices), key("i"))
    assert replayed.row.head == head.row.head
    one = await node.generate(GenerateCall(name, key("x"), max_tokens=8))
    two = await node.generate(GenerateCall(copy, key("y"), max_tokens=8))
    assert one.tokens == two.tokens
    with pytest.raises(AlreadyExistsError):
        await node.node.import_session(copy, head, again(slices), None)


async def test_an_import_of_a_fork_has_its_ancestors_logprobs(node: Running) -> None:
    parent = await source(node)
    (child,) = await node.fork(parent, "child", position=40)
    await node.generate(GenerateCall(child, key("c"), max_tokens=5, logprobs=True))
    await node.node.rewind(child, 43, None)
    await node.append(child, b"!")
    slices = [part async for part in node.node.export_log(child)]
    assert sum(value is not None for part in slices for value in part.logprobs) == 27
    copy = SessionName("w", "copy")
    await node.node.import_session(copy, await node.node.export_head(child), again(slices), key("i"))
    assert [part async for part in node.node.export_log(copy)] == slices


async def test_an_import_that_broke_off_anywhere_goes_on_when_it_is_sent_again(site: Site) -> None:
    first = await site.node()
    await first.workflow()
    name = await source(first)
    head = await first.node.export_head(name)
    slices = [part async for part in first.node.export_log(name)]
    seen = set()
    for number in range(6):
        copy = SessionName("w", f"copy{number}")
        append, calls = first.catalog.append, itertools.count()

        async def broken(call: AppendTokens) -> AppendOutcome:
            if next(calls) == number:  # noqa: B023
                raise StoreFullError("catalog", "no space left on device")
            return await append(call)  # noqa: B023

        first.catalog.append = broken  # type: ignore[method-assign,assignment]
        with contextlib.suppress(StoreFullError):
            await first.node.import_session(copy, head, again(slices), key(f"i{number}"))
        first.catalog.append = append  # type: ignore[method-assign]
        seen.add((await first.node.get_session(copy)).row.head)
        assert await first.catalog.open_generation(copy) is None, "nothing is left that would run by itself"
        view = await first.node.import_session(copy, head, again(slices), key(f"i{number}"))
        assert (view.row.head, view.row.head_hash) == (head.row.head, head.row.head_hash)
        theirs = [(g.start, g.end, g.finish) for g in (await first.node.export_head(copy)).generations]
        assert theirs == [(g.start, g.end, g.finish) for g in head.generations]
        await first.node.rewind(copy, 20, None)
        again_view = await first.node.import_session(copy, head, again(slices), key(f"i{number}"))
        assert again_view.row.head == 20, "an import that is over is not done again"
    assert seen == {0, 16, 46, 54, 65, 67}


async def test_an_import_goes_to_another_model_with_the_same_tokens(
    site: Site, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = await site.node()
    await first.workflow()
    name = await source(first)
    head = await first.node.export_head(name)
    slices = [part async for part in first.node.export_log(name)]
    other = Site(tmp_path_factory.mktemp("other"), "memory")
    node = await other.node(HashEngine(model=b"x" * 32))
    await node.workflow()
    view = await node.node.import_session(name, head, again(slices), None)
    assert view.row.head == head.row.head and view.row.head_hash != head.row.head_hash
    await other.close()


async def test_a_damaged_or_foreign_export_is_refused_and_nothing_is_made(node: Running) -> None:
    name = await source(node)
    head = await node.node.export_head(name)
    slices = [part async for part in node.node.export_log(name)]
    copy = SessionName("w", "copy")
    flipped = [replace(slices[0], token_ids=(slices[0].token_ids[0] ^ 1, *slices[0].token_ids[1:]))]
    wild = [replace(slices[0], token_ids=(100_000, *slices[0].token_ids[1:]))]
    gap = [replace(slices[0], start=1)]
    for bad, error in (
        (flipped, LogCorruptError),
        (wild, TokenOutOfRangeError),
        (gap, LogCorruptError),
        ([], LogCorruptError),
    ):
        with pytest.raises(error):
            await node.node.import_session(copy, head, again(bad), None)
    with pytest.raises(StateIncompatibleError):
        await node.node.import_session(copy, replace(head, tokenizer_digest=b"z" * 32), again(slices), None)
    assert [view.row.name for view in await node.node.list_sessions("w", None, 9, True)] == [name]


async def test_an_open_generation_is_imported_as_cancelled(node: Running) -> None:
    name = await node.session("s")
    node.engine.step_pause = 0.002
    await node.append(name, PROMPT)
    read, task = node.reading(GenerateCall(name, key("g"), max_tokens=2000))
    await until(lambda: len(read.tokens) > 5)
    head = await node.node.export_head(name)
    slices = [part async for part in node.node.export_log(name)]
    head = replace(head, row=replace(head.row, head=len(slices[0].token_ids)))
    await node.node.cancel_generation(name)
    await task
    row = (await node.node.rewind(name, head.row.head, None)).row
    copy = SessionName("w", "copy")
    view = await node.node.import_session(copy, replace(head, row=row), again(slices), None)
    assert view.state != "GENERATING" and view.row.head == head.row.head
    more = await node.generate(GenerateCall(copy, key("h"), max_tokens=5))
    assert more.tokens == continuation(slices[0].token_ids, 5, GREEDY)[0]


async def test_expired_sessions_are_deleted_by_and_by(node: Running) -> None:
    soon = node.node._core.clock.wall_us() + 50_000
    name = await node.node.create_session(CreateSession(SessionName("w", "short"), 7, expire_us=soon))
    kept = await node.session("kept")
    await node.append(name.row.name, PROMPT)
    async with asyncio.timeout(5):
        while (await node.node.get_session(name.row.name)).state != "DELETED":
            await asyncio.sleep(0.01)
    assert (await node.node.get_session(kept)).state == "ACTIVE"
    await until(lambda: node.engine.sequences == {})


async def test_expired_sessions_of_another_node_are_left_to_it_without_a_word(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    first = await site.node(options=replace(FAST, sweep_seconds=0.5))
    await first.workflow()
    soon = first.node._core.clock.wall_us() + 10_000
    name = (await first.node.create_session(CreateSession(SessionName("w", "short"), 7, expire_us=soon))).row.name
    await first.append(name, PROMPT)
    await site.node()
    async with asyncio.timeout(5):
        while (await first.node.get_session(name)).state != "DELETED":
            await asyncio.sleep(0.01)
    assert [record.message for record in caplog.records if "expired" in record.message] == []


async def test_updates_need_the_right_revision_and_reach_the_live_session(node: Running) -> None:
    name = await node.session("s", policy=CheckpointPolicy(0))
    await node.append(name, PROMPT)
    await node.idle(name)
    view = await node.node.get_session(name)
    with pytest.raises(EtagMismatchError):
        await node.node.update_session(name, view.row.revision + 7, {"a": "b"}, None, None)
    done = await node.node.update_session(name, view.row.revision, {"a": "b"}, CheckpointPolicy(16), None)
    assert (done.row.labels, done.row.policy.every_tokens) == ({"a": "b"}, 16)
    await node.append(name, PROMPT)
    await node.idle(name)
    await until(lambda: node.node.counters.checkpoints_written > 0)
    with pytest.raises(InvalidFieldError):
        await node.node.update_session(name, None, {"k": "v" * 300}, None, None)
    with pytest.raises(InvalidFieldError):
        await node.node.update_session(name, None, None, CheckpointPolicy(-1), None)


async def test_a_workflow_counts_what_forks_share_once(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.generate(GenerateCall(name, key("g"), max_tokens=10))
    children = await node.fork(name, "a", "b")
    await node.append(children[0], b"xyz")
    await node.generate(GenerateCall(children[1], key("h"), max_tokens=4))
    assert await node.node.workflow_usage("w") == Usage(len(PROMPT) + 3, 14)
    assert (await node.node.get_session(children[1])).usage == Usage(len(PROMPT), 14)


async def test_the_recovery_estimate_is_measured(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, [*PROMPT * 10, 1, 2, 3])
    await node.idle(name)
    assert (await node.node.get_session(name)).recovery_time_estimate_s > 0
    assert (await node.node.get_session(await node.session("empty"))).recovery_time_estimate_s == 0
    assert FAST.namespace == "default"
