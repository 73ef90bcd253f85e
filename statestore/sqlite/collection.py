"""Manifests as a whole, pins, condemned blobs, and who collects (statestore/collection.py has the rules)."""

from collections.abc import Sequence
from typing import Final

from forkpoint.errors import NotFoundError
from forkpoint.statestore.errors import BlobsCondemnedError, StaleCollectorError
from forkpoint.statestore.records import CollectorRow, ManifestKey, ManifestRow, Pin, ScannedManifest
from forkpoint.statestore.sqlite.tx import Tx

_HELD: Final = (
    "(EXISTS (SELECT 1 FROM checkpoints c WHERE c.chain_hash = manifests.chain_hash"
    " AND c.grid_position = manifests.grid_position AND c.numerics_id = manifests.numerics_id)"
    " OR EXISTS (SELECT 1 FROM pins p WHERE p.chain_hash = manifests.chain_hash"
    " AND p.grid_position = manifests.grid_position AND p.numerics_id = manifests.numerics_id))"
)
_BY_KEY: Final = "WHERE chain_hash = ? AND grid_position = ? AND numerics_id = ?"


def scan_manifests(tx: Tx, after: int, limit: int) -> list[ScannedManifest]:
    """Catalog.scan_manifests."""
    sql = (
        "SELECT numerics_id, grid_position, chain_hash, manifest, create_us, number,"
        f" {_HELD} FROM manifests WHERE number > ? ORDER BY number LIMIT ?"
    )
    return [ScannedManifest(row[5], ManifestRow(*row[:5]), bool(row[6])) for row in tx.rows(sql, after, limit)]


def remove_manifest(tx: Tx, key: ManifestKey) -> bool:
    """Catalog.remove_manifest."""
    return tx.run(f"DELETE FROM manifests {_BY_KEY} AND NOT {_HELD}", *_values(key)) > 0


def pin(tx: Tx, new: Pin) -> None:
    """Catalog.pin."""
    if tx.one(f"SELECT 1 FROM manifests {_BY_KEY}", *_values(new.key)) is None:
        raise NotFoundError(f"manifest {new.key.chain_hash.hex()[:16]} at {new.key.grid_position}")
    tx.run(
        "INSERT OR REPLACE INTO pins (pin, holder, chain_hash, grid_position, numerics_id, create_us)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        new.pin,
        new.holder,
        *_values(new.key),
        tx.now_us,
    )


def unpin(tx: Tx, name: str) -> None:
    """Catalog.unpin."""
    tx.run("DELETE FROM pins WHERE pin = ?", name)


def list_pins(tx: Tx) -> list[Pin]:
    """Catalog.list_pins."""
    sql = "SELECT pin, holder, chain_hash, grid_position, numerics_id, create_us FROM pins ORDER BY pin"
    return [Pin(row[0], row[1], ManifestKey(*row[2:5]), row[5]) for row in tx.rows(sql)]


def get_collector(tx: Tx, tier: str) -> CollectorRow:
    """Catalog.get_collector."""
    row = tx.one("SELECT tier, holder, term, counter FROM collectors WHERE tier = ?", tier)
    return CollectorRow(tier, "", 0, 0) if row is None else CollectorRow(*row)


def list_collectors(tx: Tx) -> list[CollectorRow]:
    """Catalog.list_collectors."""
    return [CollectorRow(*row) for row in tx.rows("SELECT tier, holder, term, counter FROM collectors ORDER BY tier")]


def elect(tx: Tx, tier: str, holder: str, expected_term: int) -> CollectorRow:
    """Catalog.elect_collector."""
    _check_term(tx, tier, expected_term)
    row = CollectorRow(tier, holder, expected_term + 1, 1)
    sql = "INSERT OR REPLACE INTO collectors (tier, holder, term, counter) VALUES (?, ?, ?, ?)"
    tx.run(sql, row.tier, row.holder, row.term, row.counter)
    return row


def renew(tx: Tx, tier: str, term: int) -> int:
    """Catalog.renew_collector."""
    _check_term(tx, tier, term)
    tx.run("UPDATE collectors SET counter = counter + 1 WHERE tier = ?", tier)
    return get_collector(tx, tier).counter


def resign(tx: Tx, tier: str, term: int) -> None:
    """Catalog.resign_collector."""
    tx.run("UPDATE collectors SET holder = '' WHERE tier = ? AND term = ?", tier, term)


def condemn(tx: Tx, tier: str, term: int, digests: Sequence[str]) -> None:
    """Catalog.condemn."""
    _check_term(tx, tier, term)
    for digest in digests:
        tx.run("INSERT OR IGNORE INTO condemned (tier, digest) VALUES (?, ?)", tier, bytes.fromhex(digest))


def absolve(tx: Tx, tier: str, term: int, digests: Sequence[str]) -> None:
    """Catalog.absolve."""
    _check_term(tx, tier, term)
    for digest in map(bytes.fromhex, digests):
        if tx.run("DELETE FROM condemned WHERE tier = ? AND digest = ?", tier, digest):
            tx.run("INSERT INTO absolved (digest) VALUES (?)", digest)


def list_condemned(tx: Tx, tier: str, after: str, limit: int) -> list[str]:
    """Catalog.list_condemned."""
    sql = "SELECT digest FROM condemned WHERE tier = ? AND digest > ? ORDER BY digest LIMIT ?"
    return [bytes(row[0]).hex() for row in tx.rows(sql, tier, bytes.fromhex(after), limit)]


def absolutions(tx: Tx) -> int:
    """Catalog.absolutions: SQLite keeps the last number, also when its row is gone."""
    row = tx.one("SELECT seq FROM sqlite_sequence WHERE name = 'absolved'")
    return 0 if row is None else int(row[0])


def forget(tx: Tx, upto: int) -> None:
    """Catalog.forget_absolutions."""
    tx.run("DELETE FROM absolved WHERE number <= ?", upto)


def check_digests(tx: Tx, digests: Sequence[str], since: int) -> None:
    """What put_checkpoint asks of its blobs. Raises BlobsCondemnedError."""
    if not digests:
        return
    last = absolutions(tx)
    if since < last:
        first = tx.one("SELECT min(number) FROM absolved")
        if first is None or first[0] is None or since < first[0] - 1:
            raise BlobsCondemnedError(digests)
    elif tx.one("SELECT 1 FROM condemned LIMIT 1") is None:
        return
    sql = (
        "SELECT EXISTS (SELECT 1 FROM condemned WHERE digest = ?1)"
        " OR EXISTS (SELECT 1 FROM absolved WHERE digest = ?1 AND number > ?2)"
    )
    refused = [digest for digest in digests if tx.rows(sql, bytes.fromhex(digest), since)[0][0]]
    if refused:
        raise BlobsCondemnedError(refused)


def _check_term(tx: Tx, tier: str, term: int) -> None:
    current = get_collector(tx, tier).term
    if current != term:
        raise StaleCollectorError(tier, term, current)


def _values(key: ManifestKey) -> tuple[bytes, int, str]:
    return key.chain_hash, key.grid_position, key.numerics_id
