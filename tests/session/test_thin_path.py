"""Create, append, generate, read, and go on after a crash."""

import pytest

from forkpoint.errors import EmptySessionError, UnavailableError
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import GenerateCall
from forkpoint.statestore.records import FinishReason, Kind
from tests.support.hash_engine import continuation
from tests.support.session_site import Running, Site, key, until

PROMPT = list(b"the quick brown fox jumps over the lazy dog")
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)


async def test_a_generation_equals_one_undisturbed_sequence(node: Running) -> None:
    name = await node.session("s")
    appended = await node.append(name, PROMPT)
    assert (appended.outcome.start, appended.outcome.head) == (0, len(PROMPT))
    read = await node.generate(GenerateCall(name, key("g"), max_tokens=50))
    expected, _ = continuation(PROMPT, 50, GREEDY)
    assert read.tokens == expected
    assert read.text == bytes(expected)
    assert read.reason is FinishReason.LENGTH
    assert read.finished is not None and read.finished.head == len(PROMPT) + 50
    assert (read.finished.usage.prompt_tokens, read.finished.usage.generated_tokens) == (len(PROMPT), 50)
    assert await node.log(name) == PROMPT + expected
    assert {kind for chunk in read.chunks for kind in chunk.kinds} == {Kind.GENERATED}


async def test_generate_on_an_empty_session_is_an_error(node: Running) -> None:
    name = await node.session("s")
    with pytest.raises(EmptySessionError):
        await node.generate(GenerateCall(name, key("g"), max_tokens=5))


async def test_a_generation_goes_on_in_a_second_node_after_a_crash(site: Site) -> None:
    first = await site.node()
    await first.workflow()
    first.engine.step_pause = 0.002
    name = await first.session("s")
    await first.append(name, PROMPT)
    call = GenerateCall(name, key("g"), max_tokens=120)
    read, task = first.reading(call)
    await until(lambda: len(read.tokens) >= 60)
    await first.crash()
    with pytest.raises(UnavailableError):
        await task
    second = await site.node()
    rest = await second.generate(GenerateCall(name, key("g"), max_tokens=120, resume_position=read.position))
    expected, _ = continuation(PROMPT, 120, GREEDY)
    assert read.tokens + rest.tokens == expected
    assert await second.log(name) == PROMPT + expected
    assert second.node.counters.restored_tokens > 0, "a checkpoint was there to be used"
    assert second.node.counters.replayed_tokens < 64
