"""Migrations: an owner's word that its session may go to another node, and the cut-over that takes it at its word."""

from forkpoint.ids import SessionName
from forkpoint.statestore.records import SessionRow
from forkpoint.statestore.rules import begins_migration, check_cut_over, check_epoch
from forkpoint.statestore.sqlite import sessions
from forkpoint.statestore.sqlite.sessions import NO_MIGRATION
from forkpoint.statestore.sqlite.tx import Tx


def begin(tx: Tx, name: SessionName, epoch: int, migration: str, target: str) -> SessionRow:
    """Catalog.begin_migration."""
    row = sessions.live(tx, name).row
    if begins_migration(row, epoch, migration, target):
        return sessions.change(tx, name, "migration = ?, migration_target = ?", migration, target)
    return row


def end(tx: Tx, name: SessionName, epoch: int, migration: str) -> SessionRow:
    """Catalog.end_migration."""
    row = sessions.live(tx, name).row
    check_epoch(name, epoch, row.epoch)
    if not migration or row.migration != migration:
        return row
    return sessions.change(tx, name, NO_MIGRATION)


def cut_over(
    tx: Tx, name: SessionName, epoch: int, migration: str, incarnation: str, head: int, head_hash: bytes
) -> SessionRow:
    """Catalog.cut_over."""
    check_cut_over(sessions.live(tx, name).row, epoch, migration, incarnation, head, head_hash)
    return sessions.change(tx, name, f"owner = ?, epoch = epoch + 1, takeovers = 0, {NO_MIGRATION}", incarnation)
