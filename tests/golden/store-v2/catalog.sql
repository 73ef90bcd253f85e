-- A catalog as version 2 wrote it, dumped by SQLite's shell. Never rewritten.

-- The values of various per-database settings
PRAGMA page_size=4096;
-- PRAGMA encoding='UTF-8';
-- PRAGMA auto_vacuum=NONE;
-- PRAGMA max_page_count=4294967294;

BEGIN TRANSACTION;

-- Table  absolved
DROP TABLE IF EXISTS absolved;
CREATE TABLE absolved (number INTEGER PRIMARY KEY AUTOINCREMENT, digest BLOB NOT NULL) STRICT;
-- Triggers and indices on  absolved
CREATE INDEX absolved_by_digest ON absolved (digest, number);

-- Table  branches
DROP TABLE IF EXISTS branches;
CREATE TABLE branches (
    branch INTEGER PRIMARY KEY AUTOINCREMENT,
    workflow TEXT NOT NULL,
    parent INTEGER REFERENCES branches (branch),
    fork_position INTEGER NOT NULL,
    stop INTEGER
) STRICT;
INSERT INTO branches VALUES(1,'w',NULL,0,NULL);
INSERT INTO branches VALUES(2,'w',1,33,NULL);
INSERT INTO branches VALUES(3,'w',NULL,0,NULL);
INSERT INTO branches VALUES(4,'w',NULL,0,NULL);
INSERT INTO branches VALUES(5,'w',NULL,0,NULL);
INSERT INTO branches VALUES(6,'w',NULL,0,NULL);
-- Triggers and indices on  branches
CREATE INDEX branches_by_workflow ON branches (workflow, branch);

-- Table  checkpoints
DROP TABLE IF EXISTS checkpoints;
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
INSERT INTO checkpoints VALUES('w','s','c-1',1,35,32,X'ADE1220CD268FB404367F5DC210EC081E5D534CD5B4BD5D4713F6AD1EA4D6FC5','cpu-2-threads',0,1700000000000012,NULL);
-- Triggers and indices on  checkpoints
CREATE INDEX checkpoints_by_grid ON checkpoints (workflow, session, grid_position);
CREATE INDEX checkpoints_by_manifest ON checkpoints (chain_hash, grid_position, numerics_id);
CREATE INDEX checkpoints_by_position ON checkpoints (workflow, session, position);

-- Table  collectors
DROP TABLE IF EXISTS collectors;
CREATE TABLE collectors (
    tier TEXT PRIMARY KEY,
    holder TEXT NOT NULL,
    term INTEGER NOT NULL,
    counter INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO collectors VALUES('tier','inc-1',1,1);

-- Table  condemned
DROP TABLE IF EXISTS condemned;
CREATE TABLE condemned (
    digest BLOB NOT NULL,
    tier TEXT NOT NULL,
    PRIMARY KEY (tier, digest)
) STRICT, WITHOUT ROWID;
INSERT INTO condemned VALUES(X'ABABABABABABABABABABABABABABABABABABABABABABABABABABABABABABABAB','tier');
-- Triggers and indices on  condemned
CREATE INDEX condemned_by_digest ON condemned (digest);

-- Table  generations
DROP TABLE IF EXISTS generations;
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
INSERT INTO generations VALUES('w','s','g-1',1,'r-1',35,'{"logprobs":true,"max_tokens":100,"min_p":0.05,"seed":-9223372036854775808,"stop_ids":[3,4],"stop_text":["ff0073746f70"],"temperature":0.7,"top_k":40,"top_p":0.95}',NULL,NULL,0);
-- Triggers and indices on  generations
CREATE INDEX generations_by_branch ON generations (branch, start);

-- Table  log
DROP TABLE IF EXISTS log;
CREATE TABLE log (
    branch INTEGER NOT NULL,
    start INTEGER NOT NULL,
    record BLOB NOT NULL,
    PRIMARY KEY (branch, start)
) STRICT, WITHOUT ROWID;
INSERT INTO log VALUES(1,0,X'010100002300000001000000000000000000000000000000010000000000000072FE2BA8E292B605279A5AD58AB9EB9A78F28E99C60766556F3A21169F61484F050000002A0000004F0000007400000099000000BE000000E3000000080100002D01000052010000770100009C010000C1010000E60100000B02000030020000550200007A0200009F020000C4020000E90200000E03000033030000580300007D030000A2030000C7030000EC03000011040000360400005B04000080040000A5040000CA040000EF04000020E93347');
INSERT INTO log VALUES(1,35,X'0102010005000000010000000000000023000000000000000100000000000000ADE1220CD268FB404367F5DC210EC081E5D534CD5B4BD5D4713F6AD1EA4D6FC514050000390500005E05000083050000A8050000000000000000E0BF000000000000E0BF000000000000E0BF000000000000E0BF000000000000E0BFDB28D3E1');
INSERT INTO log VALUES(3,0,X'010100000300000003000000000000000000000000000000010000000000000072FE2BA8E292B605279A5AD58AB9EB9A78F28E99C60766556F3A21169F61484F0100000002000000030000005E031ACB');
INSERT INTO log VALUES(4,0,X'010100000300000004000000000000000000000000000000010000000000000072FE2BA8E292B605279A5AD58AB9EB9A78F28E99C60766556F3A21169F61484F010000000200000003000000F1CDDB2B');
INSERT INTO log VALUES(5,0,X'010100000300000005000000000000000000000000000000010000000000000072FE2BA8E292B605279A5AD58AB9EB9A78F28E99C60766556F3A21169F61484F010000000200000003000000D355E64E');
INSERT INTO log VALUES(6,0,X'010100000300000006000000000000000000000000000000010000000000000072FE2BA8E292B605279A5AD58AB9EB9A78F28E99C60766556F3A21169F61484F010000000200000003000000B5FDA0E1');

-- Table  manifests
DROP TABLE IF EXISTS manifests;
CREATE TABLE manifests (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    chain_hash BLOB NOT NULL,
    grid_position INTEGER NOT NULL,
    numerics_id TEXT NOT NULL,
    manifest BLOB NOT NULL,
    create_us INTEGER NOT NULL,
    UNIQUE (chain_hash, grid_position, numerics_id)
) STRICT;
INSERT INTO manifests VALUES(1,X'ADE1220CD268FB404367F5DC210EC081E5D534CD5B4BD5D4713F6AD1EA4D6FC5',32,'cpu-2-threads',X'0A9F020801120764656661756C741A20000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F2220202122232425262728292A2B2C2D2E2F303132333435363738393A3B3C3D3E3F2A0D6370752D322D746872656164732A056F6C64657232086C61796F75742D3138204220ADE1220CD268FB404367F5DC210EC081E5D534CD5B4BD5D4713F6AD1EA4D6FC54A430A0F6B64612E3030302E73746174652E301207666C6F617433321A020808222062C749DBE718D7E26D0C239547F574430DE467E385CF79528A9D2B8104C23C242880024A450A0F6D6C612E706167652E303030303030120862666C6F617431361A030220202220B6FB73FC46938C981E2B0B4B1EF282ADCFC89854D01BFE3972FDC4785B41B2C72880201220846793B4A65FC980A150C403E2000B25B3CBA836A40F542E8F9A0A17B39BBA54',1700000000000012);

-- Table  meta
DROP TABLE IF EXISTS meta;
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO meta VALUES('application',X'666F726B706F696E74');
INSERT INTO meta VALUES('model_digest',X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F');
INSERT INTO meta VALUES('namespace',X'64656661756C74');
INSERT INTO meta VALUES('schema_version',X'32');
INSERT INTO meta VALUES('tokenizer_digest',X'202122232425262728292A2B2C2D2E2F303132333435363738393A3B3C3D3E3F');

-- Table  nodes
DROP TABLE IF EXISTS nodes;
CREATE TABLE nodes (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    incarnation TEXT NOT NULL UNIQUE,
    node TEXT NOT NULL,
    address TEXT NOT NULL,
    numerics_id TEXT NOT NULL,
    counter INTEGER NOT NULL,
    lock_path TEXT NOT NULL
) STRICT;
INSERT INTO nodes VALUES(1,'inc-1','node-a','localhost:1','cpu-2-threads',2,'/run/lock');

-- Table  pending
DROP TABLE IF EXISTS pending;
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
INSERT INTO pending VALUES('w','s',1,1,'g-1',40,42,X'ADE1220CD268FB404367F5DC210EC081E5D534CD5B4BD5D4713F6AD1EA4D6FC5',X'A5040000CA040000EF04000014050000390500005E05000083050000A80500002800000029000000',1700000000000015,X'0102010002000000010000000000000028000000000000000100000000000000ADE1220CD268FB404367F5DC210EC081E5D534CD5B4BD5D4713F6AD1EA4D6FC52800000029000000000000000000E0BF000000000000E0BF6AC861CB');

-- Table  pins
DROP TABLE IF EXISTS pins;
CREATE TABLE pins (
    pin TEXT PRIMARY KEY,
    holder TEXT NOT NULL,
    chain_hash BLOB NOT NULL,
    grid_position INTEGER NOT NULL,
    numerics_id TEXT NOT NULL,
    create_us INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO pins VALUES('p-1','inc-1',X'ADE1220CD268FB404367F5DC210EC081E5D534CD5B4BD5D4713F6AD1EA4D6FC5',32,'cpu-2-threads',1700000000000032);
-- Triggers and indices on  pins
CREATE INDEX pins_by_manifest ON pins (chain_hash, grid_position, numerics_id);

-- Table  requests
DROP TABLE IF EXISTS requests;
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
INSERT INTO requests VALUES('me','w','r-1',X'64','begin_generation','["g-1",35,"873593353534c0a56f15e4570cbd64905f20b96482b9abfcda4eeecb1f7c60eb",1]',1700000000000006);
INSERT INTO requests VALUES('me','w','r-a',X'64','acquire','{"branch":"1","create_us":1700000000000004,"delete_us":null,"epoch":1,"exact":true,"expire_us":null,"fork_position":0,"head":0,"head_hash":"72fe2ba8e292b605279a5ad58ab9eb9a78f28e99c60766556f3a21169f61484f","labels":{"k":"v"},"name":"workflows/w/sessions/s","numerics_ids":[],"owner":"inc-1","parent":null,"policy":[512,false,0],"purge_us":null,"revision":1,"seed":-5,"state":"ACTIVE","state_reason":"","transient":false,"update_us":1700000000000005}',1700000000000005);
INSERT INTO requests VALUES('me','w','r-c',X'64','create_session','{"branch":"1","create_us":1700000000000004,"delete_us":null,"epoch":0,"exact":true,"expire_us":null,"fork_position":0,"head":0,"head_hash":"72fe2ba8e292b605279a5ad58ab9eb9a78f28e99c60766556f3a21169f61484f","labels":{"k":"v"},"name":"workflows/w/sessions/s","numerics_ids":[],"owner":"","parent":null,"policy":[512,false,0],"purge_us":null,"revision":1,"seed":-5,"state":"ACTIVE","state_reason":"","transient":false,"update_us":1700000000000004}',1700000000000004);
INSERT INTO requests VALUES('me','w','r-f',X'64','fork','{"children":[{"branch":"2","create_us":1700000000000013,"delete_us":null,"epoch":0,"exact":true,"expire_us":null,"fork_position":33,"head":33,"head_hash":"c540e627ee190e9acb4a766aad7de15ac8f729417385d23acdea42888cf0cb61","labels":{"k":"v"},"name":"workflows/w/sessions/child","numerics_ids":[],"owner":"","parent":"workflows/w/sessions/s","policy":[512,false,0],"purge_us":null,"revision":1,"seed":-5,"state":"ACTIVE","state_reason":"","transient":false,"update_us":1700000000000013}],"position":33}',1700000000000013);
INSERT INTO requests VALUES('me','w','r-p',X'64','put_checkpoint','{"automatic":false,"chain_hash":"ade1220cd268fb404367f5dc210ec081e5d534cd5b4bd5d4713f6ad1ea4d6fc5","checkpoint":"c-1","create_us":1700000000000012,"expire_us":null,"grid_position":32,"numerics_id":"cpu-2-threads","position":35,"session":"workflows/w/sessions/s"}',1700000000000012);
INSERT INTO requests VALUES('me','w','r-r',X'64','release','{"branch":"3","create_us":1700000000000016,"delete_us":null,"epoch":1,"exact":true,"expire_us":null,"fork_position":0,"head":3,"head_hash":"537838ebed745d774b3076e5713a2d8677fc7ea2d7d87f3d93ef1a3fedc9297a","labels":{"k":"v"},"name":"workflows/w/sessions/paused","numerics_ids":[],"owner":"","parent":null,"policy":[512,false,0],"purge_us":null,"revision":1,"seed":-5,"state":"PAUSED","state_reason":"paused by a caller","transient":false,"update_us":1700000000000028}',1700000000000028);
INSERT INTO requests VALUES('me','w','r-w',X'64','create_workflow','{"create_us":1700000000000003,"delete_us":null,"labels":{"team":"blue"},"revision":1,"update_us":1700000000000003,"workflow":"w"}',1700000000000003);
-- Triggers and indices on  requests
CREATE INDEX requests_by_age ON requests (create_us);

-- Table  sessions
DROP TABLE IF EXISTS sessions;
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
    PRIMARY KEY (workflow, session)
) STRICT, WITHOUT ROWID;
INSERT INTO sessions VALUES('w','child',2,'ACTIVE','',0,'',33,X'ADE1220CD268FB404367F5DC210EC081E5D534CD5B4BD5D4713F6AD1EA4D6FC5',X'A5040000',0,NULL,'s',33,-5,512,0,'{"k":"v"}',0,1,'[]',NULL,1700000000000013,1700000000000013,NULL,NULL,1,0);
INSERT INTO sessions VALUES('w','gone',5,'DELETED','',2,'',3,X'72FE2BA8E292B605279A5AD58AB9EB9A78F28E99C60766556F3A21169F61484F',X'010000000200000003000000',0,NULL,NULL,0,-5,512,0,'{"k":"v"}',0,1,'[]',NULL,1700000000000022,1700000000000030,1700000000000030,1,2,0);
INSERT INTO sessions VALUES('w','isolated',4,'QUARANTINED','three failures',1,'',3,X'72FE2BA8E292B605279A5AD58AB9EB9A78F28E99C60766556F3A21169F61484F',X'010000000200000003000000',0,NULL,NULL,0,-5,512,0,'{"k":"v"}',0,1,'[]',NULL,1700000000000019,1700000000000029,NULL,NULL,1,0);
INSERT INTO sessions VALUES('w','paused',3,'PAUSED','paused by a caller',1,'',3,X'72FE2BA8E292B605279A5AD58AB9EB9A78F28E99C60766556F3A21169F61484F',X'010000000200000003000000',0,NULL,NULL,0,-5,512,0,'{"k":"v"}',0,1,'[]',NULL,1700000000000016,1700000000000028,NULL,NULL,1,0);
INSERT INTO sessions VALUES('w','s',1,'ACTIVE','',1,'inc-1',40,X'ADE1220CD268FB404367F5DC210EC081E5D534CD5B4BD5D4713F6AD1EA4D6FC5',X'A5040000CA040000EF04000014050000390500005E05000083050000A8050000',0,'g-1',NULL,0,-5,512,0,'{"k":"v"}',0,1,'[]',NULL,1700000000000004,1700000000000011,NULL,NULL,1,0);
INSERT INTO sessions VALUES('w','taken',6,'ACTIVE','',2,'inc-2',3,X'72FE2BA8E292B605279A5AD58AB9EB9A78F28E99C60766556F3A21169F61484F',X'010000000200000003000000',0,NULL,NULL,0,-5,512,0,'{"k":"v"}',0,1,'[]',NULL,1700000000000025,1700000000000031,NULL,NULL,1,0);
-- Triggers and indices on  sessions
CREATE INDEX sessions_that_generate ON sessions (workflow, session) WHERE open_generation IS NOT NULL;

-- Table  workflows
DROP TABLE IF EXISTS workflows;
CREATE TABLE workflows (
    workflow TEXT PRIMARY KEY,
    labels TEXT NOT NULL,
    create_us INTEGER NOT NULL,
    update_us INTEGER NOT NULL,
    delete_us INTEGER,
    revision INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO workflows VALUES('w','{"team":"blue"}',1700000000000003,1700000000000003,NULL,1);

-- For primary key autoincrements the next id to use is stored in
-- sqlite_sequence
DELETE FROM main.sqlite_sequence WHERE name='branches';
INSERT INTO main.sqlite_sequence VALUES ('branches', 6);
DELETE FROM main.sqlite_sequence WHERE name='manifests';
INSERT INTO main.sqlite_sequence VALUES ('manifests', 1);
DELETE FROM main.sqlite_sequence WHERE name='nodes';
INSERT INTO main.sqlite_sequence VALUES ('nodes', 1);

COMMIT TRANSACTION;
