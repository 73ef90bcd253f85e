"""Forks and rewinds: new branches that share their past."""

from forkpoint.errors import SessionBusyError
from forkpoint.ids import SessionName
from forkpoint.statestore.calls import ForkOutcome, ForkSessions
from forkpoint.statestore.records import RequestKey, SessionRow
from forkpoint.statestore.rowjson import session_from_value, session_to_value
from forkpoint.statestore.rules import check_children, check_owned, check_position
from forkpoint.statestore.sqlite import log, pending, requests, sessions
from forkpoint.statestore.sqlite.tx import Tx


def fork(tx: Tx, call: ForkSessions) -> ForkOutcome:
    """Catalog.fork."""
    answer = requests.find(tx, call.request, "fork")
    if answer is not None:
        children = tuple(session_from_value(child) for child in answer["children"])
        return ForkOutcome(children, answer["position"], True)
    check_children(call)
    pending.settle(tx, call.parent)
    stored = sessions.live(tx, call.parent)
    position = stored.row.head if call.position is None else call.position
    check_position(call.parent, position, stored.row.head)
    birth = sessions.Birth(
        parent_branch=_branch_below(tx, stored.branch, position),
        chain=log.position_chain(tx, stored, position),
        parent=call.parent,
        exact=stored.row.exact,
        numerics_ids=stored.row.numerics_ids,
    )
    rows = tuple(sessions.insert(tx, child, birth) for child in call.children)
    answer = {"position": position, "children": [session_to_value(row) for row in rows]}
    requests.store(tx, call.request, "fork", answer)
    return ForkOutcome(rows, position, False)


def rewind(tx: Tx, name: SessionName, epoch: int, position: int, request: RequestKey | None) -> tuple[SessionRow, bool]:
    """Catalog.rewind."""
    answer = requests.find(tx, request, "rewind")
    if answer is not None:
        return session_from_value(answer), True
    stored = sessions.live(tx, name)
    check_owned(stored.row, epoch)
    if stored.open_generation is not None:
        raise SessionBusyError(str(name), f"generation {stored.open_generation}", stored.row.head)
    check_position(name, position, stored.row.head)
    chain = log.position_chain(tx, stored, position)
    branch = sessions.add_branch(tx, name.workflow, _branch_below(tx, stored.branch, position), position)
    tx.run("UPDATE branches SET stop = ? WHERE branch = ?", stored.row.head, stored.branch)
    tx.run(
        "UPDATE sessions SET branch = ?, rewound_from = max(rewound_from, head), fork_position = min(fork_position, ?),"
        f" {sessions.NO_MIGRATION} WHERE workflow = ? AND session = ?",
        branch,
        position,
        name.workflow,
        name.session,
    )
    log.move_head(tx, name, chain)
    row = sessions.load(tx, name).row
    requests.store(tx, request, "rewind", session_to_value(row))
    return row, False


def _branch_below(tx: Tx, branch: int, position: int) -> int | None:
    """The branch that owns the last token before `position`: branches that add nothing are left out, so that chains
    of forks stay short. None at 0: nothing is shared."""
    if position == 0:
        return None
    row = tx.one(
        "WITH RECURSIVE up (branch, parent, begin) AS ("
        " SELECT branch, parent, fork_position FROM branches WHERE branch = ?1"
        " UNION ALL SELECT b.branch, b.parent, b.fork_position FROM up JOIN branches AS b ON b.branch = up.parent"
        " WHERE up.begin >= ?2)"
        " SELECT branch FROM up WHERE begin < ?2",
        branch,
        position,
    )
    return branch if row is None else int(row[0])
