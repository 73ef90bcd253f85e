"""The step's commit: one call a workflow, an outcome a session."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from forkpoint.ids import SessionName
from forkpoint.statestore.calls import StepCommit, StepOutcome, StepStatus
from forkpoint.statestore.records import Kind
from forkpoint.statestore.redis.access import TRIES, Access
from forkpoint.statestore.redis.acknowledged import learn, note
from forkpoint.statestore.redis.functions import Argument, FunctionCall
from forkpoint.statestore.redis.proposals import Proposal, ask, propose
from forkpoint.statestore.redis.refusals import log_goes_on

MISSING: Final = "MISSING"


async def commit(access: Access, commits: Sequence[StepCommit]) -> list[StepOutcome]:
    """Catalog.commit_step. One round trip when this process knows the heads, as an owner does. When one server of
    several fails, the workflows of the others are committed all the same."""
    outcomes: dict[int, StepOutcome] = {}
    for _ in range(TRIES * (1 + len(commits))):
        part = _first_of_each(commits, outcomes)
        if not part:
            break
        await _commit_some(access, commits, part, outcomes)
    return [outcomes[index] for index in range(len(commits))]


def _first_of_each(commits: Sequence[StepCommit], done: dict[int, StepOutcome]) -> list[int]:
    """Of every session the first commit that has no outcome."""
    first: dict[SessionName, int] = {}
    for index, commit in enumerate(commits):
        if index not in done:
            first.setdefault(commit.session, index)
    return list(first.values())


async def _commit_some(
    access: Access, commits: Sequence[StepCommit], part: Sequence[int], outcomes: dict[int, StepOutcome]
) -> None:
    """Try the commits numbered in `part`; those whose head was not as known get no outcome yet."""
    unknown = [commits[index].session for index in part if _is_behind(access, commits[index])]
    if unknown:
        await learn(access, unknown)
    proposals = {index: _proposal(access, commits[index]) for index in part}
    by_workflow: dict[str, list[int]] = {}
    for index in part:
        by_workflow.setdefault(commits[index].session.workflow, []).append(index)
    calls = [
        _call(access, workflow, [(commits[index], proposals[index]) for index in indices])
        for workflow, indices in by_workflow.items()
    ]
    failed: BaseException | None = None
    for indices, reply in zip(by_workflow.values(), await access.functions.run(calls), strict=True):
        if isinstance(reply, BaseException):
            failed = failed or reply
            for index in indices:
                access.heads.forget(commits[index].session)
            continue
        refused = {int(found[0]) - 1: found[1:] for found in reply}
        for place, index in enumerate(indices):
            outcome = await _outcome(access, commits[index], proposals[index], refused.get(place))
            if outcome is not None:
                outcomes[index] = outcome
    if failed is not None:
        raise access.functions.error(failed) from failed


def _is_behind(access: Access, commit: StepCommit) -> bool:
    known = access.heads.get(commit.session)
    return known is None or known.chain.position != commit.start


def _proposal(access: Access, commit: StepCommit) -> Proposal:
    known = access.heads.get(commit.session)
    if known is None or known.chain.position != commit.start or commit.epoch < 0:
        return ask(access.root, commit.start)
    return propose(known, commit.epoch, Kind.GENERATED, commit.token_ids, commit.logprobs)


def _call(access: Access, workflow: str, parts: Iterable[tuple[StepCommit, Proposal]]) -> FunctionCall:
    arguments: list[Argument] = []
    count = 0
    for commit, proposal in parts:
        finish = "" if commit.finish is None else commit.finish.value
        arguments += [commit.session.session, commit.epoch, commit.generation, finish, *proposal.arguments()]
        count += 1
    given = (access.functions.now_us(), count, *arguments)
    return FunctionCall(access.keys.workflow(workflow), "commit_step", given, writes=True)


async def _outcome(
    access: Access, commit: StepCommit, proposal: Proposal, refused: Sequence[Any] | None
) -> StepOutcome | None:
    """The outcome of one commit, None when it is to be tried again. `refused`: why it was not written and the session's
    row. Raises LogCorruptError, LogTailMissingError."""
    if refused is None:
        access.heads.set(commit.session, proposal.head)
        chain = proposal.head.chain
        return StepOutcome(StepStatus.COMMITTED, chain.position, chain.head_hash(), commit.epoch)
    status = bytes(refused[0]).decode()
    if status == MISSING:
        await note(access, commit.session, [])
        return StepOutcome(StepStatus.CONFLICT, 0, access.root, 0)
    epoch, *told = refused[1:]
    found = await note(access, commit.session, told)
    if status == "MOVED" or found is None:
        return None
    chain = found.chain
    if status == "LOG_GOES_ON":
        raise log_goes_on(commit.session, chain.position)
    return StepOutcome(StepStatus(status), chain.position, chain.head_hash(), int(epoch))
