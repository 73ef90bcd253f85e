"""Operations that arrive while a session moves: each takes effect once, at the source or at the target."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from forkpoint.errors import ForkpointError, NotFoundError, SessionPausedError, SessionRelocatingError
from forkpoint.ids import SessionName
from forkpoint.server.session.api import AppendCall, CreateSession, ForkCall, Input
from forkpoint.statestore.records import FinishReason, SessionState
from tests.support.hash_engine import continuation
from tests.support.moving import GREEDY, PROMPT, Hold, ends_well, expected, listen, move, nodes, owner_of, speaks
from tests.support.session_site import Running, Site, background, key, until


@dataclass
class Move:
    """A move that stands still where the test wants it: before the target follows ("follow"), or while the session is
    held and the target is asked to own it ("cut_over")."""

    site: Site
    source: Running
    target: Running
    name: SessionName
    hold: Hold = field(default_factory=Hold)
    task: "asyncio.Task[object] | None" = None

    async def start(self, phase: str) -> None:
        self.site.street.before[phase] = self.hold
        self.task = background(move(self.source, self.name, self.target))
        await self.hold.reached.wait()

    async def anywhere(self, act: Callable[[Running], Awaitable[object]]) -> object:
        """Call it as a client behind forwarding nodes does: at the source, then wherever it is sent."""
        node = self.source
        async with asyncio.timeout(10):
            while True:
                try:
                    return await act(node)
                except SessionRelocatingError as error:
                    node = next(n for n in self.site.nodes if n.options.address == error.address)
                except ForkpointError as error:
                    if error.reason not in ("UNAVAILABLE", "NODE_DRAINING"):
                        raise
                await asyncio.sleep(0.002)

    async def end(self) -> tuple[object]:
        """Let it go on; what came of it."""
        self.hold.go_on.set()
        assert self.task is not None
        (outcome,) = await asyncio.gather(self.task, return_exceptions=True)
        return (outcome,)


@pytest.fixture
async def scene(memory_site: Site) -> AsyncIterator[Move]:
    source, target = await nodes(memory_site)
    yield Move(memory_site, source, target, await speaks(source))


PHASES = pytest.mark.parametrize("phase", ["follow", "cut_over"])


@PHASES
async def test_an_append_goes_where_the_session_is_then(scene: Move, phase: str) -> None:
    await scene.start(phase)
    call = AppendCall(scene.name, Input(token_ids=tuple(b" and more")), request=key("a"))
    appending = background(scene.anywhere(lambda node: node.node.append(call)))
    if phase == "follow":
        await appending
    await scene.end()
    await appending
    await ends_well(scene.site, scene.name, [*PROMPT, *b" and more"], scene.target)


@PHASES
async def test_a_generation_begins_where_the_session_is_then(scene: Move, phase: str) -> None:
    await scene.start(phase)
    stream = listen(scene.site, scene.name, 30)
    if phase == "follow":
        await until(lambda: len(stream.tokens) > 3)
    await scene.end()
    assert (await stream.done()).tokens == continuation(PROMPT, 30, GREEDY)[0]
    await ends_well(scene.site, scene.name, expected(PROMPT, 30), scene.target)


@PHASES
async def test_a_pause_ends_the_move_or_comes_after_it(scene: Move, phase: str) -> None:
    await scene.start(phase)
    pausing = background(scene.anywhere(lambda node: node.node.pause(scene.name, key("p"))))
    if phase == "follow":
        await pausing
    (outcome,) = await scene.end()
    await pausing
    assert isinstance(outcome, SessionPausedError) is (phase == "follow"), outcome
    row = await scene.source.catalog.get_session(scene.name)
    assert (row.state, row.owner, row.migration) == (SessionState.PAUSED, "", "")
    await until(lambda: not any(node.node._core.follows or node.engine.sequences for node in scene.site.nodes))


@PHASES
async def test_a_deletion_ends_the_move_or_comes_after_it(scene: Move, phase: str) -> None:
    await scene.start(phase)
    deleting = background(scene.anywhere(lambda node: node.node.delete_session(scene.name, key("d"))))
    if phase == "follow":
        await deleting
    (outcome,) = await scene.end()
    await deleting
    assert isinstance(outcome, NotFoundError) is (phase == "follow"), outcome
    await until(lambda: not any(node.node._core.follows or node.engine.sequences for node in scene.site.nodes))


@PHASES
async def test_a_rewind_is_followed_or_comes_after_the_move(scene: Move, phase: str) -> None:
    """The tokens that were turned back are in nobody's state."""
    stream = listen(scene.site, scene.name, 40)
    await stream.done()
    await scene.start(phase)
    turning = background(scene.anywhere(lambda node: node.node.rewind(scene.name, 77, key("r"))))
    if phase == "follow":
        await turning
    await scene.end()
    await turning
    await scene.anywhere(lambda node: node.append(scene.name, b"otherwise", "a"))
    log = [*expected(PROMPT, 40)[:77], *b"otherwise"]
    read = await listen(scene.site, scene.name, 20, "h").done()
    assert read.tokens == continuation(log, 20, GREEDY)[0]
    await ends_well(scene.site, scene.name, log + read.tokens, scene.target)


async def test_a_rewind_while_the_target_follows_makes_it_begin_anew(scene: Move) -> None:
    stream = listen(scene.site, scene.name, 60)
    await stream.done()
    scene.target.engine.step_pause = 0.05
    moving = background(move(scene.source, scene.name, scene.target))
    await until(lambda: scene.name in scene.target.node._core.follows)
    await scene.source.node.rewind(scene.name, 70, None)
    await scene.source.append(scene.name, b"another past")
    await moving
    scene.target.engine.step_pause = 0
    await ends_well(scene.site, scene.name, [*expected(PROMPT, 60)[:70], *b"another past"], scene.target)


@PHASES
async def test_a_fork_and_a_checkpoint_are_taken_all_the_same(scene: Move, phase: str) -> None:
    await scene.start(phase)
    forking = background(scene.anywhere(lambda node: node.node.fork(ForkCall(scene.name, 1, 40, ("child",)))))
    saving = background(scene.anywhere(lambda node: node.node.create_checkpoint(scene.name, "c1", None)))
    await asyncio.sleep(0.02)
    await scene.end()
    await asyncio.gather(forking, saving)
    child = SessionName(scene.name.workflow, "child")
    read = await listen(scene.site, child, 10).done()
    assert read.tokens == continuation(PROMPT[:40], 10, GREEDY)[0]
    assert (await scene.target.node.get_checkpoint(scene.name, "c1")).row.position == len(PROMPT)
    await ends_well(scene.site, scene.name, PROMPT, scene.target)


@PHASES
async def test_a_cancelled_generation_ends_once(scene: Move, phase: str) -> None:
    stream = listen(scene.site, scene.name, 500)
    await until(lambda: len(stream.tokens) > 3)
    await scene.start(phase)
    cancelling = background(scene.anywhere(lambda node: node.node.cancel_generation(scene.name)))
    if phase == "follow":
        await cancelling
    await scene.end()
    await cancelling
    read = await stream.done()
    assert read.reason is FinishReason.CANCELLED
    assert read.tokens == continuation(PROMPT, len(read.tokens), GREEDY)[0]
    await ends_well(scene.site, scene.name, expected(PROMPT, len(read.tokens)), scene.target)


async def test_no_operation_waits_for_long_at_a_session_that_can_not_leave(scene: Move) -> None:
    """The target does not answer; who calls meanwhile is told to come again, and finds the session."""
    await scene.start("cut_over")
    with pytest.raises(ForkpointError, match="on its way"):
        await scene.source.append(scene.name, b"now")
    await scene.end()
    await scene.anywhere(lambda node: node.append(scene.name, b" then", "a"))
    await ends_well(scene.site, scene.name, [*PROMPT, *b" then"], scene.target)


async def test_the_checkpoint_policy_and_the_seed_move_along(scene: Move) -> None:
    view = await scene.source.node.create_session(CreateSession(SessionName("w", "t"), 5, transient=True))
    await scene.source.append(view.row.name, PROMPT)
    await move(scene.source, view.row.name, scene.target)
    row = owner_of(scene.site, view.row.name)[1].row
    assert (row.seed, row.transient, row.policy) == (5, True, view.row.policy)
    await ends_well(scene.site, view.row.name, PROMPT, scene.target)
