"""Errors of a node among others, and of sessions that move between nodes. Their place in the tree is told in
errors.py."""

from forkpoint.errors import AbortedError, PreconditionError, UnavailableError


class NodeStalledError(UnavailableError):
    """The node's work does not get on: what it promised now it might never do."""

    reason = "NODE_STALLED"

    def __init__(self, node: str, what: str) -> None:
        super().__init__(f"node {node} does not get on: {what} takes too long")
        self.node, self.what = node, what


class MigrationUnderwayError(AbortedError):
    """The session is on its way to another node already."""

    reason = "MIGRATION_UNDERWAY"

    def __init__(self, session: str, migration: str, target: str) -> None:
        super().__init__(f"{session} is on its way to {target} already, by migration {migration}")
        self.session, self.migration, self.target = session, migration, target


class MigrationEndedError(PreconditionError):
    """The owner took back its word that the session may go."""

    reason = "MIGRATION_ENDED"

    def __init__(self, session: str, migration: str) -> None:
        super().__init__(f"{session}: migration {migration} has ended")
        self.session, self.migration = session, migration


class MoveFailedError(PreconditionError):
    """The session stays where it is; `cause` says why."""

    reason = "MOVE_FAILED"

    def __init__(self, session: str, target: str, cause: str) -> None:
        super().__init__(f"{session} was not moved to {target}: {cause}")
        self.session, self.target, self.cause = session, target, cause
