"""When a generation ends, and what its reader is told."""

import pytest

from forkpoint.errors import ContextFullError
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import GenerateCall, Input
from forkpoint.statestore.calls import StepCommit
from forkpoint.statestore.records import FinishReason
from tests.support.hash_engine import HashEngine, continuation
from tests.support.session_site import FAST, Running, Site, key, until

AB = (97, 98)
PROMPT = list(b"say a or b")


async def ab_node(site: Site, **facts: int) -> Running:
    running = await site.node(HashEngine(alphabet=AB, **facts))  # type: ignore[arg-type]
    await running.workflow()
    return running


def expected(count: int) -> bytes:
    return bytes(continuation(PROMPT, count, Sample(0.0, 0, 1.0, 0.0, 7), AB)[0])


async def test_a_stop_string_over_several_tokens_ends_the_generation(site: Site) -> None:
    node = await ab_node(site)
    name = await node.session("s")
    whole = expected(200)
    stop = whole[30:38]
    at = whole.find(stop)
    read = await node.generate(
        GenerateCall(name, key("g"), Input(token_ids=tuple(PROMPT)), stop_text=(stop, b"zzz"), max_tokens=200)
    )
    assert read.text == whole[:at]
    assert bytes(read.tokens) == whole[: at + len(stop)], "the log keeps the tokens of the stop"
    assert read.finished is not None
    assert read.reason is FinishReason.STOP
    assert read.finished.stop_position == len(PROMPT) + at
    assert read.finished.head == len(PROMPT) + at + len(stop)


async def test_a_stop_that_began_in_the_prompt_does_not_count(site: Site) -> None:
    node = await ab_node(site)
    name = await node.session("s")
    stop = bytes(PROMPT[-3:]) + expected(1)
    read = await node.generate(
        GenerateCall(name, key("g"), Input(token_ids=tuple(PROMPT)), stop_text=(stop,), max_tokens=4)
    )
    assert read.reason is FinishReason.LENGTH


async def test_what_looked_like_a_stop_comes_out_at_the_end(site: Site) -> None:
    node = await ab_node(site)
    name = await node.session("s")
    text = expected(10)
    stop = text[-3:] + b"z"
    read = await node.generate(
        GenerateCall(name, key("g"), Input(token_ids=tuple(PROMPT)), stop_text=(stop,), max_tokens=10)
    )
    assert read.text == text
    assert read.reason is FinishReason.LENGTH
    assert read.finished is not None and read.finished.stop_position == -1


async def test_a_stop_id_ends_the_generation(site: Site) -> None:
    node = await ab_node(site)
    name = await node.session("s")
    whole = expected(50)
    at = whole.find(b"b")
    read = await node.generate(
        GenerateCall(name, key("g"), Input(token_ids=tuple(PROMPT)), stop_ids=(98,), max_tokens=50)
    )
    assert (read.reason, read.text) == (FinishReason.STOP, whole[:at])
    assert bytes(read.tokens) == whole[: at + 1]
    assert read.finished is not None and read.finished.stop_position == len(PROMPT) + at


async def test_the_context_limit_ends_a_generation_and_refuses_a_prompt(site: Site) -> None:
    node = await ab_node(site, context_limit=40)
    name = await node.session("s")
    with pytest.raises(ContextFullError):
        await node.append(name, b"x" * 41)
    assert (await node.node.get_session(name)).row.head == 0
    read = await node.generate(GenerateCall(name, key("g"), Input(token_ids=tuple(PROMPT))))
    assert read.reason is FinishReason.CONTEXT_FULL
    assert bytes(read.tokens) == expected(30)
    with pytest.raises(ContextFullError):
        await node.append(name, b"x")
    full = await node.generate(GenerateCall(name, key("h"), max_tokens=3))
    assert (full.reason, full.tokens) == (FinishReason.CONTEXT_FULL, [])


async def test_cancel_ends_at_a_token_border_and_the_session_goes_on(node: Running) -> None:
    name = await node.session("s")
    node.engine.step_pause = 0.002
    await node.append(name, PROMPT)
    read, task = node.reading(GenerateCall(name, key("g")))
    await until(lambda: len(read.tokens) > 10)
    view = await node.node.cancel_generation(name)
    await task
    assert read.reason is FinishReason.CANCELLED
    assert view.row.head == len(PROMPT) + len(read.tokens)
    assert (await node.node.cancel_generation(name)).row.head == view.row.head, "nothing left to cancel"
    more = await node.generate(GenerateCall(name, key("h"), max_tokens=20))
    both, _ = continuation(PROMPT, len(read.tokens) + 20, Sample(0.0, 0, 1.0, 0.0, 7))
    assert read.tokens + more.tokens == both


@pytest.mark.parametrize("ended_by", ["length", "stop", "id"])
async def test_a_kill_between_the_last_token_and_its_end_samples_nothing_more(site: Site, ended_by: str) -> None:
    """The log alone says that the generation is over: the next node must see it before it samples."""
    node = await ab_node(site)
    name = await node.session("s")
    whole = expected(12)
    stops = {"length": {}, "stop": {"stop_text": (whole[8:12],)}, "id": {"stop_ids": (whole[11],)}}[ended_by]
    node.engine.failures = [RuntimeError("no step")] * 10_000
    call = GenerateCall(name, key("g"), Input(token_ids=tuple(PROMPT)), max_tokens=12, **stops)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        await node.generate(call)
    view = await node.node.get_session(name)
    generation = await node.catalog.open_generation(name)
    assert generation is not None
    tokens = tuple(whole) if ended_by != "id" else tuple(whole[: whole.find(whole[11]) + 1])
    if ended_by == "stop":
        tokens = tuple(whole[: whole.find(whole[8:12]) + 4])
    commit = StepCommit(name, view.row.epoch, view.row.head, tokens, generation.generation)
    await node.catalog.commit_step([commit])
    await node.crash()
    second = await site.node(HashEngine(alphabet=AB))
    read = await second.generate(call)
    assert bytes(read.tokens) == bytes(tokens)
    assert read.reason is (FinishReason.LENGTH if ended_by == "length" else FinishReason.STOP)
    assert second.engine.steps == [] or all(work.sample is None for step in second.engine.steps for work in step)


async def test_sampling_parameters_and_the_seed_decide_and_logprobs_are_kept(node: Running) -> None:
    name = await node.session("s", seed=-5)
    await node.append(name, PROMPT)
    call = GenerateCall(name, key("g"), max_tokens=20, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, logprobs=True)
    read = await node.generate(call)
    tokens, logprobs = continuation(PROMPT, 20, Sample(0.7, 5, 0.9, 0.01, -5, True))
    assert (read.tokens, read.logprobs) == (tokens, logprobs)
    again = await node.generate(call)
    assert (again.tokens, again.logprobs) == (tokens, logprobs), "replayed from the log"
    assert FAST.end_ids == ()
