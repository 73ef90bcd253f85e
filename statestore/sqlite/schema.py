"""The tables, in one place. docs/formats.md says what each column means."""

from typing import Final

_TABLES: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT, WITHOUT ROWID;

CREATE TABLE nodes (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    incarnation TEXT NOT NULL UNIQUE,
    node TEXT NOT NULL,
    address TEXT NOT NULL,
    numerics_id TEXT NOT NULL,
    counter INTEGER NOT NULL,
    lock_path TEXT NOT NULL,
    status TEXT NOT NULL DEFAULT '{}'
) STRICT;

CREATE TABLE workflows (
    workflow TEXT PRIMARY KEY,
    labels TEXT NOT NULL,
    create_us INTEGER NOT NULL,
    update_us INTEGER NOT NULL,
    delete_us INTEGER,
    revision INTEGER NOT NULL,
    standbys INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

-- A branch's log begins at fork_position; what lies before is its parent's. `stop` is the head that it was left at.
CREATE TABLE branches (
    branch INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow TEXT NOT NULL,
    parent INTEGER REFERENCES branches (branch),
    fork_position INTEGER NOT NULL,
    stop INTEGER
) STRICT;

CREATE TABLE sessions (
    workflow TEXT NOT NULL REFERENCES workflows (workflow),
    session TEXT NOT NULL,
    branch INTEGER NOT NULL UNIQUE REFERENCES branches (branch),
    state TEXT NOT NULL,
    state_reason TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    owner TEXT NOT NULL,
    head INTEGER NOT NULL,
    grid_hash BLOB NOT NULL,
    tail BLOB NOT NULL,
    rewound_from INTEGER NOT NULL,
    open_generation TEXT,
    parent TEXT,
    fork_position INTEGER NOT NULL,
    seed INTEGER NOT NULL,
    every_tokens INTEGER NOT NULL,
    on_turn_end INTEGER NOT NULL,
    labels TEXT NOT NULL,
    transient INTEGER NOT NULL,
    exact INTEGER NOT NULL,
    numerics_ids TEXT NOT NULL,
    expire_us INTEGER,
    create_us INTEGER NOT NULL,
    update_us INTEGER NOT NULL,
    delete_us INTEGER,
    purge_us INTEGER,
    revision INTEGER NOT NULL,
    keep_last INTEGER NOT NULL DEFAULT 0,
    standbys INTEGER NOT NULL DEFAULT 0,
    migration TEXT NOT NULL DEFAULT '',
    migration_target TEXT NOT NULL DEFAULT '',
    takeovers INTEGER NOT NULL DEFAULT 0,
    takeover_head INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (workflow, session)
) STRICT, WITHOUT ROWID;
CREATE INDEX sessions_that_generate ON sessions (workflow, session) WHERE open_generation IS NOT NULL;

CREATE TABLE log (
    branch INTEGER NOT NULL,
    start INTEGER NOT NULL,
    record BLOB NOT NULL,
    PRIMARY KEY (branch, start)
) STRICT, WITHOUT ROWID;

CREATE TABLE generations (
    workflow TEXT NOT NULL,
    session TEXT NOT NULL,
    generation TEXT NOT NULL,
    branch INTEGER NOT NULL,
    request_id TEXT NOT NULL,
    start INTEGER NOT NULL,
    params TEXT NOT NULL,
    finish TEXT,
    stop INTEGER,
    input_start INTEGER,
    PRIMARY KEY (workflow, session, generation)
) STRICT, WITHOUT ROWID;
CREATE INDEX generations_by_branch ON generations (branch, start);

CREATE TABLE checkpoints (
    workflow TEXT NOT NULL,
    session TEXT NOT NULL,
    checkpoint TEXT NOT NULL,
    branch INTEGER NOT NULL,
    position INTEGER NOT NULL,
    grid_position INTEGER NOT NULL,
    chain_hash BLOB NOT NULL,
    numerics_id TEXT NOT NULL,
    automatic INTEGER NOT NULL,
    create_us INTEGER NOT NULL,
    expire_us INTEGER,
    PRIMARY KEY (workflow, session, checkpoint)
) STRICT, WITHOUT ROWID;
CREATE INDEX checkpoints_by_position ON checkpoints (workflow, session, position);

CREATE TABLE requests (
    caller TEXT NOT NULL,
    workflow TEXT NOT NULL,
    request_id TEXT NOT NULL,
    digest BLOB NOT NULL,
    call TEXT NOT NULL,
    result TEXT NOT NULL,
    create_us INTEGER NOT NULL,
    PRIMARY KEY (caller, workflow, request_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX requests_by_age ON requests (create_us);
"""

_COLLECTION: Final = """
-- A manifest that is replaced takes a new number: a scan by number goes on where it ended and misses nothing.
CREATE TABLE manifests (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    chain_hash BLOB NOT NULL,
    grid_position INTEGER NOT NULL,
    numerics_id TEXT NOT NULL,
    manifest BLOB NOT NULL,
    create_us INTEGER NOT NULL,
    UNIQUE (chain_hash, grid_position, numerics_id)
) STRICT;

CREATE TABLE pins (
    pin TEXT PRIMARY KEY,
    holder TEXT NOT NULL,
    chain_hash BLOB NOT NULL,
    grid_position INTEGER NOT NULL,
    numerics_id TEXT NOT NULL,
    create_us INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX pins_by_manifest ON pins (chain_hash, grid_position, numerics_id);

CREATE TABLE collectors (
    tier TEXT PRIMARY KEY,
    holder TEXT NOT NULL,
    term INTEGER NOT NULL,
    counter INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE condemned (
    digest BLOB NOT NULL,
    tier TEXT NOT NULL,
    PRIMARY KEY (tier, digest)
) STRICT, WITHOUT ROWID;
CREATE INDEX condemned_by_digest ON condemned (digest);

CREATE TABLE absolved (number INTEGER PRIMARY KEY AUTOINCREMENT, digest BLOB NOT NULL) STRICT;
CREATE INDEX absolved_by_digest ON absolved (digest, number);

CREATE INDEX branches_by_workflow ON branches (workflow, branch);
CREATE INDEX checkpoints_by_grid ON checkpoints (workflow, session, grid_position);
CREATE INDEX checkpoints_by_manifest ON checkpoints (chain_hash, grid_position, numerics_id);
"""
"""What retention and garbage collection brought with version 2."""

_PENDING: Final = """
-- Log records that still grow, one a session; `start` is the head in `sessions` until they move into `log`.
CREATE TABLE pending (
    workflow TEXT NOT NULL,
    session TEXT NOT NULL,
    branch INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    generation TEXT NOT NULL,
    start INTEGER NOT NULL,
    head INTEGER NOT NULL,
    grid_hash BLOB NOT NULL,
    tail BLOB NOT NULL,
    update_us INTEGER NOT NULL,
    record BLOB NOT NULL,
    PRIMARY KEY (workflow, session)
) STRICT, WITHOUT ROWID;
"""
"""What version 2 commits a step into (pending.py)."""

SCHEMA: Final = _TABLES + _COLLECTION + _PENDING

_FROM_VERSION_1: Final = f"""
ALTER TABLE sessions ADD COLUMN keep_last INTEGER NOT NULL DEFAULT 0;
ALTER TABLE checkpoints ADD COLUMN expire_us INTEGER;
ALTER TABLE manifests RENAME TO manifests_of_version_1;
{_COLLECTION}
{_PENDING}
INSERT INTO manifests (chain_hash, grid_position, numerics_id, manifest, create_us)
    SELECT chain_hash, grid_position, numerics_id, manifest, create_us FROM manifests_of_version_1 ORDER BY rowid;
DROP TABLE manifests_of_version_1;
"""

_FROM_VERSION_2: Final = """
ALTER TABLE nodes ADD COLUMN status TEXT NOT NULL DEFAULT '{}';
ALTER TABLE workflows ADD COLUMN standbys INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN standbys INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN migration TEXT NOT NULL DEFAULT '';
ALTER TABLE sessions ADD COLUMN migration_target TEXT NOT NULL DEFAULT '';
ALTER TABLE sessions ADD COLUMN takeovers INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN takeover_head INTEGER NOT NULL DEFAULT 0;
"""

UPGRADES: Final = {1: _FROM_VERSION_1 + _FROM_VERSION_2, 2: _FROM_VERSION_2}
"""Version -> what makes a store of it one of this version."""
