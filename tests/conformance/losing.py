"""A catalog behind a bad line, and the caller that copes with it: a call that fails is made again, under the request id
that it had.

Whoever uses the pair sees a catalog that keeps its contract, or the contract is broken: that a call either happens or
does not, and that its request id tells which.
"""

import inspect
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final, cast

from forkpoint.errors import ForkpointError, StoreUnavailableError
from forkpoint.ids import SessionName
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, StepOutcome, StepStatus
from forkpoint.statestore.records import CheckpointRow, NewSession, RequestKey, WorkflowRow

SAME_AGAIN: Final = ("pin", "unpin", "condemn", "absolve", "remove_node", "begin_migration", "end_migration")
"""Calls without a request id that change nothing when they are made again."""
READS: Final = ("get_", "list_", "find_", "read_", "scan_", "nearest_", "open_generation", "lineage", "absolutions")
_NUMBERS = itertools.count()


class NotDoneError(StoreUnavailableError):
    """A call that never reached the store."""

    def __init__(self) -> None:
        super().__init__("catalog", "injected: not done")


class LostAnswerError(StoreUnavailableError):
    """A call that did. `answer`: what was on its way back, a value or an error; only the tests can see it."""

    def __init__(self, answer: object) -> None:
        super().__init__("catalog", "injected: the answer is lost")
        self.answer = answer


class LosingCatalog:
    """Stands for a catalog whose calls fail at random: with nothing done, or done and the answer lost."""

    def __init__(self, inner: Catalog, before: float, after: float, seed: int) -> None:
        self._inner = inner
        self._before = before
        self._after = after
        self._rng = random.Random(seed)
        self.losses: dict[str, int] = {}
        """Answers lost, by method."""

    def __getattr__(self, method: str) -> Any:
        attribute = getattr(self._inner, method)
        if not callable(attribute) or method in ("open", "close"):
            return attribute
        target = cast(Callable[..., Awaitable[object]], attribute)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self._rng.random() < self._before:
                raise NotDoneError
            lost = may_be_repeated(method, args, kwargs) and self._rng.random() < self._after
            try:
                answer = await target(*args, **kwargs)
            except ForkpointError as error:
                if lost:
                    raise LostAnswerError(error) from error
                raise
            if lost:
                self.losses[method] = self.losses.get(method, 0) + 1
                raise LostAnswerError(answer)
            return answer

        return call


class RepeatingCatalog:
    """Stands for a catalog whose every call is answered: made again until it is, under a request id of its own when the
    caller gave none. The answer of a repeated call must be that of the first one that was carried out."""

    def __init__(self, losing: LosingCatalog) -> None:
        self._losing = losing

    @classmethod
    def over(cls, inner: Catalog, seed: int = 1) -> Catalog:
        """The pair around a catalog, typed as the port."""
        return cast(Catalog, cls(LosingCatalog(inner, before=0.2, after=0.5, seed=seed)))

    def __getattr__(self, method: str) -> Any:
        attribute = getattr(self._losing, method)
        if not callable(attribute) or method in ("open", "close"):
            return attribute
        target = cast(Callable[..., Awaitable[object]], attribute)

        async def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = with_request(method, args, kwargs)
            lost: LostAnswerError | None = None
            answer: object
            while True:
                try:
                    answer = await target(*args, **kwargs)
                except LostAnswerError as error:
                    lost = lost or error
                    continue
                except NotDoneError:
                    continue
                except ForkpointError as error:
                    answer = error
                first = answer if lost is None or method.startswith(READS) else lost.answer
                assert agree(method, first, answer), f"{method}: {first} the first time, {answer} the next"
                if isinstance(first, ForkpointError):
                    raise first
                return first

        return call


def may_be_repeated(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a caller can tell what became of a call by making it again."""
    if method == "commit_step":
        return all(commit.token_ids or commit.finish for commit in args[0])
    return (
        method.startswith(READS)
        or method in SAME_AGAIN
        or kwargs.get("request") is not None
        or any(isinstance(value, RequestKey) or getattr(value, "request", None) is not None for value in args)
    )


def with_request(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with a fresh request id, where the method takes one and none is given."""
    value = args[0] if args else None
    if isinstance(value, AppendTokens | BeginGeneration | ForkSessions):
        session = value.parent if isinstance(value, ForkSessions) else value.session
        return (replace(value, request=value.request or fresh(session.workflow)), *args[1:]), kwargs
    signature = inspect.signature(getattr(Catalog, method, with_request))
    if "request" not in signature.parameters:
        return args, kwargs
    bound = signature.bind(None, *args, **kwargs)
    if method != "find_request" and bound.arguments.get("request") is None:
        bound.arguments["request"] = fresh(workflow_of(value))
    return bound.args[1:], bound.kwargs


def fresh(workflow: str) -> RequestKey:
    """A request key that nobody has had."""
    return RequestKey("repeating", workflow, f"again-{next(_NUMBERS)}", b"same")


def workflow_of(value: object) -> str:
    """Of a call's first argument."""
    if isinstance(value, WorkflowRow):
        return value.workflow
    if isinstance(value, NewSession):
        return value.name.workflow
    if isinstance(value, CheckpointRow):
        return value.session.workflow
    assert isinstance(value, SessionName), value
    return value.workflow


def agree(method: str, first: object, again: object) -> bool:
    """Whether the answer of a repeated call says the same as its first one."""
    if isinstance(first, ForkpointError) or isinstance(again, ForkpointError):
        return type(first) is type(again)
    if method == "commit_step":
        assert isinstance(first, list) and isinstance(again, list)
        return len(first) == len(again) and all(map(_same_step, first, again))
    return _without_replayed(first) == _without_replayed(again)


def _same_step(first: StepOutcome, again: StepOutcome) -> bool:
    """A step has no request id: the head tells its owner that it was committed."""
    if first.status is StepStatus.COMMITTED and again.status is not StepStatus.COMMITTED:
        return again == replace(first, status=StepStatus.CONFLICT)
    return first == again


def _without_replayed(answer: object) -> object:
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], bool):
        return answer[0]
    return replace(cast(Any, answer), replayed=False) if hasattr(answer, "replayed") else answer
