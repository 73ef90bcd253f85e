"""What only a look at the keys sees: indices that miss rows, rows that point at nothing, references to nothing."""

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from forkpoint.errors import LogCorruptError
from forkpoint.ids import SessionName
from forkpoint.statestore.findings import Finding, Severity
from forkpoint.statestore.redis.access import Access
from forkpoint.statestore.redis.hashes import checkpoint_of, fields_of, manifest_key_text, session_of
from forkpoint.statestore.redis.keys import PREFIX

TOGETHER: Final = 500
"""Commands in one pipeline."""


@dataclass(slots=True)
class FoundKeys:
    """Names of keys, by what they hold."""

    sessions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Workflow to those of its sessions that have a row."""
    logs: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Workflow to branches that have records."""
    references: list[str] = field(default_factory=list)
    """Manifest keys that are referred to."""
    workflows: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Session:
    branch: str
    state: str
    generation: str
    head: int
    damage: str


async def findings(access: Access) -> list[Finding]:
    """All that is wrong, as a list."""
    return [finding async for finding in walk(access)]


async def walk(access: Access) -> AsyncIterator[Finding]:
    """Everything wrong that shows in the keys. Run it on a quiet store: what a node is just writing, in two slots one
    after the other, may show."""
    keys = await _scan(access)
    store = access.keys.store
    listed = {name.decode() for name in await access.functions.look(store, *_all(f"{store}:workflows"))}
    for workflow in sorted(keys.workflows | keys.sessions.keys()):
        if workflow not in listed:
            yield _error("BAD_INDEX", f"workflows/{workflow}", "it is on no list of workflows")
        async for finding in _check_workflow(access, workflow, keys):
            yield finding
    async for finding in _check_references(access, keys.references):
        yield finding


def _error(kind: str, where: str, detail: str) -> Finding:
    return Finding(Severity.ERROR, kind, where, detail)


def _all(index: str) -> tuple[str | int, ...]:
    return ("ZRANGE", index, 0, -1)


async def _scan(access: Access) -> FoundKeys:
    found = FoundKeys()
    workflow_start, references_start = f"{PREFIX}{{{access.keys.namespace}:w:", f"{access.keys.store}:references:"
    async for names in access.functions.connection.scan(f"{PREFIX}{{{access.keys.namespace}:*"):
        for name in names:
            if name.startswith(references_start):
                found.references.append(name.removeprefix(references_start))
            elif name.startswith(workflow_start):
                workflow, _, rest = name.removeprefix(workflow_start).partition("}:")
                kind, _, row = rest.partition(":")
                if kind == "workflow":
                    found.workflows.add(workflow)
                elif kind == "session":
                    found.sessions[workflow].add(row)
                elif kind == "log":
                    found.logs[workflow].add(row)
    return found


async def _pipeline(access: Access, base: str, commands: Sequence[tuple[str | int, ...]]) -> list[Any]:
    replies: list[Any] = []
    for first in range(0, len(commands), TOGETHER):
        calls = [(base, command) for command in commands[first : first + TOGETHER]]
        replies += await access.functions.look_many(calls)
    return replies


async def _check_workflow(access: Access, workflow: str, keys: FoundKeys) -> AsyncIterator[Finding]:
    base, where = access.keys.workflow(workflow), f"workflows/{workflow}"
    if workflow not in keys.workflows:
        yield _error("ORPHAN_SESSION", where, "it has sessions and no row")
    indices = await _pipeline(access, base, [_all(f"{base}:{name}") for name in ("sessions", "live", "open")])
    listed, live, generating = ({bytes(name).decode() for name in index} for index in indices)
    sessions = await _load_sessions(access, workflow, base, sorted(keys.sessions[workflow]))
    flat = await access.functions.look(base, "HGETALL", f"{base}:branches")
    branches = {name: value.decode().split(" ") for name, value in fields_of(flat).items()}
    for name in sorted(listed ^ sessions.keys()):
        yield _error("BAD_INDEX", f"{where}/sessions/{name}", "row and list of sessions do not agree")
    for name, row in sessions.items():
        shown = f"{where}/sessions/{name}"
        if row.damage:
            yield _error("DAMAGED_ROW", shown, row.damage)
        if (name in live) != (row.state != "DELETED"):
            yield _error("BAD_INDEX", shown, "row and list of sessions that are not deleted do not agree")
        if (name in generating) != (row.generation != ""):
            yield _error("BAD_INDEX", shown, "row and list of sessions that generate do not agree")
        if row.branch not in branches:
            yield _error("ORPHAN_BRANCH", shown, f"its branch {row.branch} does not exist")
    for finding in _check_branches(where, branches):
        yield finding
    for findings_of in (_check_logs, _check_generations, _check_checkpoints):
        async for finding in findings_of(access, workflow, branches, keys, sessions):
            yield finding
    async for finding in _check_listing(access, workflow, bool(generating)):
        yield finding


async def _load_sessions(access: Access, workflow: str, base: str, names: Sequence[str]) -> dict[str, _Session]:
    rows = await _pipeline(access, base, [("HGETALL", f"{base}:session:{name}") for name in names])
    found: dict[str, _Session] = {}
    for name, flat in zip(names, rows, strict=True):
        fields = fields_of(flat)
        branch, state, generation, head = (
            fields.get(field, b"").decode(errors="replace") for field in ("branch", "state", "generation", "head")
        )
        try:
            session_of(SessionName(workflow, name), fields)
            damage = ""
        except LogCorruptError as error:
            damage = error.cause
        found[name] = _Session(branch, state, generation, int(head) if head.isdigit() else -1, damage)
    return found


def _check_branches(where: str, branches: dict[str, list[str]]) -> list[Finding]:
    found = []
    for branch, (parent, begin, *_) in branches.items():
        right = parent in branches and int(branches[parent][1]) < int(begin) if parent else begin == "0"
        if not right:
            detail = "a branch's parent does not exist or begins at or behind the fork"
            found.append(_error("WRONG_PARENT", f"{where} branch {branch}", detail))
    return found


async def _check_logs(
    access: Access, workflow: str, branches: dict[str, list[str]], keys: FoundKeys, sessions: dict[str, _Session]
) -> AsyncIterator[Finding]:
    base, logs = access.keys.workflow(workflow), sorted(keys.logs[workflow])
    first = await _pipeline(access, base, [("XRANGE", f"{base}:log:{log}", "-", "+", "COUNT", 1) for log in logs])
    for log, entries in zip(logs, first, strict=True):
        start = int(bytes(entries[0][0]).partition(b"-")[0]) if entries else 0
        if log not in branches or (entries and start < int(branches[log][1])):
            detail = "log records of a branch that does not exist, or before its fork"
            yield _error("ORPHAN_LOG", f"workflows/{workflow} branch {log}", detail)


async def _check_generations(
    access: Access, workflow: str, branches: dict[str, list[str]], keys: FoundKeys, sessions: dict[str, _Session]
) -> AsyncIterator[Finding]:
    base = access.keys.workflow(workflow)
    opened = [(name, row) for name, row in sessions.items() if row.generation]
    rows = await _pipeline(
        access, base, [("HMGET", f"{base}:generation:{n}:{row.generation}", "start", "finish") for n, row in opened]
    )
    for (name, row), (start, finish) in zip(opened, rows, strict=True):
        shown = f"workflows/{workflow}/sessions/{name}"
        if start is None or finish is not None:
            yield _error("OPEN_GENERATION", shown, "the session's open generation is not an unfinished one")
        elif int(start) > row.head:
            yield _error("GENERATION_BEYOND_HEAD", shown, "an unfinished generation starts beyond the head")


async def _check_checkpoints(
    access: Access, workflow: str, branches: dict[str, list[str]], keys: FoundKeys, sessions: dict[str, _Session]
) -> AsyncIterator[Finding]:
    base, store = access.keys.workflow(workflow), access.keys.store
    names = [bytes(name).decode() for name in (await _pipeline(access, base, [_all(f"{base}:checkpoint-names")]))[0]]
    pairs = [name.split(" ", 1) for name in names]
    rows = await _pipeline(access, base, [("HGETALL", f"{base}:checkpoint:{s}:{c}") for s, c in pairs])
    for (session, checkpoint), flat in zip(pairs, rows, strict=True):
        shown = f"workflows/{workflow}/sessions/{session}/checkpoints/{checkpoint}"
        if not flat:
            yield _error("BAD_INDEX", shown, "it is listed and has no row")
            continue
        row = checkpoint_of(workflow, (session.encode(), checkpoint.encode(), flat))
        key, reference = manifest_key_text(row.manifest_key), fields_of(flat).get("reference", b"")
        commands: list[tuple[str | int, ...]] = [("EXISTS", f"{store}:manifest:{key}")]
        commands.append(("SISMEMBER", f"{store}:references:{key}", reference.decode()))
        there, referred = await _pipeline(access, store, commands)
        if not there:
            detail, subject = "it names a manifest that does not exist", (workflow, session, checkpoint)
            yield Finding(Severity.ERROR, "MANIFEST_MISSING", shown, detail, subject)
        elif not referred:
            yield _error("REFERENCE_MISSING", shown, "its manifest does not know of it and may be collected")


async def _check_listing(access: Access, workflow: str, generates: bool) -> AsyncIterator[Finding]:
    """A workflow with open generations is on the store's list of such."""
    base, store = access.keys.workflow(workflow), access.keys.store
    token = bytes(await access.functions.look(base, "HGET", f"{base}:workflow", "listed") or b"").decode()
    there = token and await access.functions.look(store, "SISMEMBER", f"{store}:generating", f"{workflow} {token}")
    if (generates or token) and not there:
        yield _error("BAD_INDEX", f"workflows/{workflow}", "its open generations are on no list")


async def _check_references(access: Access, manifests: Sequence[str]) -> AsyncIterator[Finding]:
    """A reference that no checkpoint holds is what a crash left between the two steps of a put."""
    store = access.keys.store
    for key in manifests:
        for member in await access.functions.look(store, "SMEMBERS", f"{store}:references:{key}"):
            reference = bytes(member).decode()
            workflow, session, checkpoint, _ = reference.split(" ")
            base = access.keys.workflow(workflow)
            held = await access.functions.look(base, "HGET", f"{base}:checkpoint:{session}:{checkpoint}", "reference")
            if held != member:
                where, detail = f"manifest {key}", f"it is kept for {reference!r}, which does not exist"
                yield Finding(Severity.WARNING, "LEAKED_REFERENCE", where, detail, (key, reference))
