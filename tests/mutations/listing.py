"""The mistakes. A change of the code that makes one of them impossible to write down replaces it by its like."""

from typing import Final

from tests.mutations.collection_listing import COLLECTION
from tests.mutations.model_listing import MODELS
from tests.mutations.mutation import Mutation
from tests.mutations.redis_listing import REDIS

CRASH: Final = "tests/crash/test_crash.py"
SHORT_CRASH: Final = f"{CRASH}::test_a_crash_of_a_short_script_keeps_everything_acknowledged"
SIM: Final = ("tests/sim/test_sim.py", "-k", "every_promise_holds")
SIM_STORE: Final = "tests/sim/test_sim.py::test_nobody_is_told_what_a_failover_can_take_back"
FORKS: Final = "tests/exactness/test_forks.py::test_a_childs_tokens_never_reach_its_parent_or_its_siblings"
EMBEDDED: Final = ("-k", "memory or sqlite")
IN_MEMORY: Final = ("-k", "memory")

DURABILITY: Final = (
    Mutation(
        "skip-fsync-of-a-commit",
        "SQLite commits without syncing the WAL",
        "statestore/sqlite/connection.py",
        'db.pragma("synchronous", self._synchronous)',
        'db.pragma("synchronous", "OFF")',
        (SHORT_CRASH,),
    ),
    Mutation(
        "acknowledge-before-commit",
        "a call is answered inside its transaction, before COMMIT",
        "statestore/sqlite/group.py",
        "                    self._attempt(db, call, alone=len(group) == 1)\n"
        "        except BaseException as error:  # noqa: BLE001 - whatever it is, every caller must hear of it\n"
        "            for call in group:\n                call.error = call.error or error\n"
        "        for call in group:\n            call.settle()\n",
        "                    self._attempt(db, call, alone=len(group) == 1)\n                    call.settle()\n"
        "                __import__('time').sleep(0.005)\n        except BaseException:\n            raise\n",
        (SHORT_CRASH,),
    ),
    Mutation(
        "skip-fsync-of-a-blob",
        "a blob's content is not synced before its name is given",
        "statestore/file/ops.py",
        "            os.fdatasync(descriptor)\n",
        "",
        ("tests/statestore/test_file_syncs.py",),
        fast=True,
    ),
    Mutation(
        "skip-fsync-of-a-blobs-name",
        "a blob's folder is not synced behind its rename",
        "statestore/file/blobs.py",
        "        facts = self._ops.facts(path)\n        self._sync(path.parent)\n",
        "        facts = self._ops.facts(path)\n",
        (SHORT_CRASH,),
    ),
    Mutation(
        "share-a-sync-that-began-before",
        "a blob's name counts as synced by a sync of its folder that had begun already",
        "statestore/file/groupsync.py",
        "        self._synced = for_all\n",
        "        self._synced = self._asked\n",
        ("tests/statestore/test_groupsync.py",),
    ),
    Mutation(
        "has-without-durability",
        "`has` says yes to a name that may not survive a crash",
        "statestore/file/blobs.py",
        "        if self._durable.get(path.name) != facts.mark:\n",
        "        if False:\n",
        ("tests/statestore/test_file_fence.py",),
    ),
    Mutation(
        "manifest-before-blobs",
        "a manifest is committed before its blobs are put",
        "statestore/partsaver.py",
        "        new = await self._blobs.put(digest, *frame)\n",
        "        new = True\n        asyncio.get_running_loop().call_later(0.05, lambda: "
        "asyncio.get_running_loop().create_task(self._blobs.put(digest, *frame)))\n",
        (SHORT_CRASH,),
    ),
)

FENCING: Final = (
    Mutation(
        "skip-the-epoch-check",
        "a call under an old epoch is not refused",
        "statestore/rules.py",
        "    if epoch != row.epoch or not row.owner:\n",
        "    if False:\n",
        SIM,
        fast=True,
    ),
    Mutation(
        "skip-the-epoch-of-a-step",
        "a step of a former owner is committed",
        "statestore/memory/log.py",
        "        if commit.epoch != stored.row.epoch or not stored.row.owner:\n",
        "        if commit.epoch > stored.row.epoch or not stored.row.owner:\n",
        SIM,
    ),
    Mutation(
        "skip-the-epoch-of-a-step-in-sqlite",
        "the same in SQLite",
        "statestore/sqlite/step.py",
        "        if commit.epoch != row.epoch or row.released:\n",
        "        if commit.epoch > row.epoch or row.released:\n",
        ("tests/conformance/test_log.py", *EMBEDDED),
    ),
    Mutation(
        "remember-a-step-that-was-undone",
        "SQLite's next step goes on from one that was rolled back",
        "statestore/sqlite/step.py",
        "self._connection.undone)",
        "0)",
        ("tests/statestore/test_sqlite_pending.py",),
    ),
    Mutation(
        "overlook-another-process",
        "SQLite's next step does not see what another process wrote",
        "statestore/sqlite/step.py",
        'int(tx.db.pragma("data_version"))',
        "0",
        ("tests/statestore/test_sqlite_pending.py",),
    ),
    Mutation(
        "overlook-another-call",
        "SQLite's next step does not see what another call of the process wrote",
        "statestore/sqlite/catalog.py",
        "        self._steps.forget()\n",
        "",
        ("tests/statestore/test_sqlite_pending.py",),
    ),
    Mutation(
        "fork-without-pending-tokens",
        "a fork in SQLite does not move what its parent generated last",
        "statestore/sqlite/forks.py",
        "    pending.settle(tx, call.parent)\n",
        "",
        ("tests/statestore/test_sqlite_pending.py",),
    ),
    Mutation(
        "keep-the-epoch",
        "a new owner gets the old one's epoch",
        "statestore/memory/sessions.py",
        "owner=incarnation, epoch=epoch + 1,",
        "owner=incarnation, epoch=epoch,",
        SIM,
    ),
    Mutation(
        "overlook-a-late-beginning",
        "a node does not look again for a generation that the store has and it has not",
        "server/session/writers.py",
        "            self._claims.doubt(live)\n            await self._claims.confirmed(live)\n",
        "",
        ("tests/session/test_store_failures.py", *IN_MEMORY),
    ),
    Mutation(
        "answer-from-memory",
        "a node that lost a session answers for it from memory",
        "server/session/claims.py",
        "        if row.epoch != live.epoch or row.owner != self.core.incarnation:\n",
        "        if row.epoch < 0:\n",
        ("tests/session/test_stale_owner.py", *IN_MEMORY),
    ),
    Mutation(
        "release-over-a-pause",
        "a node that stops releases a session whose pause is under way",
        "server/session/shutdown.py",
        "        if live.suspect or self._core.lives.get(live.name) is not live:\n            return\n",
        "",
        ("tests/session/test_pause.py", "-k", "under_way and memory"),
    ),
)

MOVES: Final = (
    Mutation(
        "write-into-a-released-session",
        "an owner goes on writing after it released the session",
        "statestore/rules.py",
        "    if epoch != row.epoch or not row.owner:\n",
        "    if epoch != row.epoch:\n",
        ("tests/conformance/test_sessions.py", *EMBEDDED),
    ),
    Mutation(
        "cut-over-without-a-word",
        "a session goes to whom its owner did not name, or after it took its word back",
        "statestore/rules.py",
        "    if not migration or (row.migration, row.migration_target) != (migration, incarnation):\n",
        "    if not migration:\n",
        ("tests/conformance/test_migrations.py", *EMBEDDED),
    ),
    Mutation(
        "cut-over-at-another-head",
        "a session goes to a node that has not all of its log",
        "statestore/rules.py",
        "    if (row.head, row.head_hash) != (head, head_hash):\n",
        "    if False:\n",
        ("tests/conformance/test_migrations.py", *EMBEDDED),
    ),
)

LOG: Final = (
    Mutation(
        "publish-before-commit",
        "a client is shown a token before it is durable",
        "server/session/loop.py",
        "            outcomes = await self._core.catalog.commit_step([commit for _, commit in commits])\n",
        "            from forkpoint.statestore.records import Kind\n"
        "            rows = [live.row for live, _ in commits]\n"
        "            for live, commit in commits:\n"
        "                live.grow(commit.token_ids, Kind.GENERATED, b'')\n"
        "            await asyncio.sleep(0.001)\n"
        "            for (live, _), row in zip(commits, rows, strict=True):\n"
        "                live.tail.cut(row.head)\n                live.row = row\n"
        "            outcomes = await self._core.catalog.commit_step([commit for _, commit in commits])\n",
        ("tests/session/test_store_failures.py", *IN_MEMORY),
    ),
    Mutation(
        "forget-the-answer",
        "the answer of a request id is not stored with its effect",
        "statestore/memory/rows.py",
        "        answers[answer_key(request)] = StoredAnswer(",
        "        _ = StoredAnswer(",
        SIM,
    ),
    Mutation(
        "take-an-answer-twice",
        "an append that another node executed is counted again",
        "server/session/writers.py",
        "            if outcome.start == live.head and not outcome.replayed:\n",
        "            if True:\n",
        ("tests/session/test_lost_tail.py",),
    ),
    Mutation(
        "trust-a-shorter-log",
        "a node goes on from tokens that the store has lost",
        "server/session/core.py",
        "        if row.branch != live.row.branch or row.head >= live.head:\n",
        "        if True:\n",
        ("tests/session/test_lost_tail.py",),
    ),
    Mutation(
        "skip-the-expected-hash",
        "a client whose log differs is not told",
        "statestore/rules.py",
        "    if expected_hash is not None and expected_hash != head_hash:\n",
        "    if False:\n",
        ("tests/conformance/test_log.py", *EMBEDDED),
    ),
    Mutation(
        "hide-a-lost-tail",
        "a store that knows less than its client says conflict, not loss",
        "statestore/rules.py",
        "        if position > max(head, rewound_from):\n",
        "        if False:\n",
        ("tests/conformance/test_log.py", *EMBEDDED),
    ),
    Mutation(
        "skip-the-chain",
        "records of a log are read without comparing one's chain with the tokens before it",
        "statestore/logrecord.py",
        "        elif stretch.chain is not None and stretch.chain.grid_hash != record.chain:\n",
        "        elif False:\n",
        ("tests/statestore/test_logrecord.py",),
    ),
)

STATE: Final = (
    Mutation(
        "child-learns-what-its-parent-learns",
        "a fork's child takes the pages that its parent stores later for its own",
        "server/session/fork.py",
        "            parent.stored.of(parent.sequence).copy(parent.sequence),\n",
        "            parent.stored.of(parent.sequence),\n",
        ("tests/session/test_stored_parts.py", *IN_MEMORY),
    ),
    Mutation(
        "name-a-blob-without-looking",
        "a checkpoint names a blob that it left out without looking whether it is there",
        "statestore/partsaver.py",
        "                if not there:\n                    raise",
        "                if False:\n                    raise",
        ("tests/statestore/test_checkpoint_store.py",),
    ),
    Mutation(
        "alias-a-slot",
        "a fork uses its parent's KDA slot",
        "server/engine/runner.py",
        "        child = self._add(slot, full + copies, parent.consumed)\n",
        "        child = self._add(parent.slot, full + copies, parent.consumed)\n",
        (FORKS,),
    ),
    Mutation(
        "share-a-partial-page",
        "a fork appends to its parent's partial page",
        "server/engine/runner.py",
        "            self.tensors.copy_page(source, target)\n",
        "            pass\n",
        (FORKS,),
    ),
    Mutation(
        "use-an-image-of-another-log",
        "a child starts from its fork's image, whatever its log became elsewhere",
        "server/session/fork.py",
        "        if not _leads_to(image.chain, earlier, head_hash):\n",
        "        if False:\n",
        ("tests/session/test_fork.py", *IN_MEMORY),
    ),
    Mutation(
        "consume-a-token-twice",
        "a restore replays from one token too early",
        "server/session/restore.py",
        "        live.consumed = live.needed_from = position\n",
        "        live.consumed = live.needed_from = max(0, position - 1)\n",
        SIM,
    ),
    Mutation(
        "restore-off-the-chain",
        "a checkpoint is found by its position alone",
        "statestore/memory/catalog.py",
        "if (row.grid_position, row.chain_hash) in wanted",
        "if row.grid_position in {position for position, _ in wanted}",
        SIM,
    ),
    Mutation(
        "skip-the-content-digest",
        "a blob's content is not compared with its name",
        "statestore/codec.py",
        "    if digest_of(raw) != digest:\n",
        "    if False:\n",
        ("tests/statestore/test_codec.py",),
    ),
    Mutation(
        "skip-the-manifests-hash",
        "a manifest's hash over itself is not compared",
        "statestore/manifest.py",
        "        if blake3(sealed.manifest).digest() != sealed.self_hash:\n",
        "        if False:\n",
        ("tests/statestore/test_checkpoint_store.py", "-k", "flipped"),
    ),
)

STORE_NODES: Final = (
    Mutation(
        "answer-before-the-replica-has-it",
        "the simulated Redis acknowledges REPLICATED before the replica has the write",
        "tests/sim/store.py",
        "ready if self.durability is Durability.REPLICATED else self._loop.time()",
        "self._loop.time()",
        (SIM_STORE,),
    ),
    Mutation(
        "read-what-is-not-replicated",
        "the simulated Redis shows REPLICATED readers what a failover may take back",
        "tests/sim/store.py",
        "            ready = max(ready, self._writes[-1].replicated)\n",
        "            pass\n",
        (SIM_STORE,),
    ),
)

MUTATIONS: Final = (*DURABILITY, *FENCING, *MOVES, *LOG, *STATE, *COLLECTION, *STORE_NODES, *MODELS, *REDIS)
