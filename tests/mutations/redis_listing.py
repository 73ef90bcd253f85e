"""Mistakes in the Redis catalog: in its functions, which are Lua, and around them."""

from typing import Final

from tests.mutations.mutation import Mutation

REDIS: Final = (
    Mutation(
        "redis-stale-owner-changes-a-row",
        "any owner may change a session in Redis",
        "statestore/redis/lua/sessions.lua",
        "if row and row[1] ~= epoch then",
        "if row and false then",
        ("tests/conformance/test_sessions.py::test_a_stale_owner_can_change_nothing[valkey]",),
    ),
    Mutation(
        "redis-step-of-a-former-owner",
        "a step of a former owner is committed",
        "statestore/redis/lua/log.lua",
        "  if row[1] ~= epoch or row[6] == '' then\n",
        "  if row[6] == '' then\n",
        ("tests/conformance/test_log.py::test_a_step_commits_many_sessions_and_answers_each[valkey]",),
    ),
    Mutation(
        "redis-write-into-a-released-session",
        "an owner goes on writing after it released the session",
        "statestore/redis/lua/log.lua",
        "  if row[1] ~= epoch or row[6] == '' then\n",
        "  if row[1] ~= epoch then\n",
        ("tests/conformance/test_sessions.py", "-k", "valkey and not cluster and not faults"),
    ),
    Mutation(
        "redis-cut-over-without-a-word",
        "a session goes to whom its owner did not name, or after it took its word back",
        "statestore/redis/lua/migrations.lua",
        "  if row[2] == '' or row[2] ~= migration or row[3] ~= owner then\n",
        "  if row[2] == '' then\n",
        ("tests/conformance/test_migrations.py", "-k", "valkey and not cluster and not faults"),
    ),
    Mutation(
        "redis-cut-over-at-another-head",
        "a session goes to a node that has not all of its log",
        "statestore/redis/lua/migrations.lua",
        "  if unexpected(row[5], known_hash, head, hash) then\n",
        "  if false then\n",
        ("tests/conformance/test_migrations.py", "-k", "valkey and not cluster and not faults"),
    ),
    Mutation(
        "redis-proposal-from-another-branch",
        "a proposal is compared with the head by its position alone",
        "statestore/redis/lua/log.lua",
        "return known.branch == branch and known.head == head and known.chain == chain",
        "return known.branch ~= '' and known.head == head",
        (
            "tests/statestore/test_redis_catalog.py::test_a_writer_that_knows_the_same_position_on_another_branch_goes_on_from_the_row[valkey]",
        ),
    ),
    Mutation(
        "redis-checkpoint-of-a-rewound-log",
        "a rewind between the two steps of put_checkpoint does not matter",
        "statestore/redis/lua/checkpoints.lua",
        "if known ~= row[2] then",
        "if false then",
        (
            "tests/statestore/test_redis_listing.py::test_a_checkpoint_whose_log_was_rewound_on_the_way_is_refused[valkey]",
        ),
    ),
    Mutation(
        "redis-answers-are-not-kept",
        "the answer of a request id is not stored",
        "statestore/redis/lua/common.lua",
        "    if request ~= '' then\n      local key = request_key(tx.base, request)",
        "    if false then\n      local key = request_key(tx.base, request)",
        (
            "tests/conformance/test_requests.py::test_a_repeated_append_gives_the_stored_answer_and_adds_nothing[valkey]",
        ),
    ),
    Mutation(
        "redis-request-id-of-another-call",
        "a request id with other content is answered",
        "statestore/redis/lua/common.lua",
        "if stored[2] ~= digest or (call and call ~= stored[3]) then",
        "if false then",
        ("tests/conformance/test_requests.py::test_an_answer_of_one_call_is_never_given_to_another[valkey]",),
    ),
    Mutation(
        "redis-manifest-that-is-named-goes",
        "a manifest that a checkpoint names may be removed",
        "statestore/redis/lua/manifests.lua",
        "return redis.call('SCARD', base .. ':references:' .. key) > 0 or",
        "return",
        ("tests/conformance/test_collection.py::test_a_manifest_is_removed_only_when_nothing_names_it[valkey]",),
    ),
    Mutation(
        "redis-condemned-blobs-are-named",
        "a manifest may name condemned blobs",
        "statestore/redis/lua/manifests.lua",
        "  if #refused > 0 then",
        "  if false then",
        (
            "tests/statestore/test_redis_listing.py::test_a_condemned_blob_is_refused_before_anything_is_written[valkey]",
        ),
    ),
    Mutation(
        "redis-drop-by-an-older-tree",
        "checkpoints are dropped though the tree has grown",
        "statestore/redis/lua/checkpoints.lua",
        "if (redis.call('HGET', workflow_key(base), 'branch') or '0') ~= lineage then",
        "if false then",
        ("tests/conformance/test_retention.py::test_nothing_is_dropped_once_the_tree_has_grown[valkey-create]",),
    ),
    Mutation(
        "redis-references-are-forgotten",
        "the reference of a removed checkpoint is not taken from its manifest",
        "statestore/redis/lua/checkpoints.lua",
        "  redis.call('SADD', base .. ':unreferenced'",
        "  redis.call('ECHO', base .. ':unreferenced'",
        (
            "tests/statestore/test_redis_listing.py::test_a_deletion_that_breaks_off_is_finished_by_the_next_one[valkey]",
        ),
    ),
    Mutation(
        "redis-cancelled-reference-is-used",
        "a put whose reference was taken back goes through",
        "statestore/redis/lua/checkpoints.lua",
        "if redis.call('EXISTS', cancelled_key(base, reference)) == 1 then",
        "if false then",
        (
            "tests/statestore/test_redis_listing.py::test_repair_takes_a_leaked_reference_back_and_a_put_under_way_starts_anew[valkey]",
        ),
    ),
    Mutation(
        "redis-begin-under-an-entry-that-went",
        "a generation begins under a list entry that was taken off",
        "statestore/redis/lua/open.lua",
        "if token == '' or redis.call('EXISTS', tx.base .. ':unlisted:' .. token) == 1 then",
        "if token == '' then",
        (
            "tests/statestore/test_redis_listing.py::test_a_begin_that_was_on_its_way_while_its_entry_went_lists_itself_anew[valkey]",
        ),
    ),
    Mutation(
        "redis-log-behind-the-head",
        "records behind the head are not noticed",
        "statestore/redis/lua/reads.lua",
        "stop == head and last and last >= head and '1' or '0'",
        "'0'",
        ("tests/statestore/test_redis_catalog.py::test_missing_foreign_altered_and_stray_records_are_found[valkey]",),
    ),
    Mutation(
        "redis-replicas-are-not-waited-for",
        "REPLICATED is acknowledged without WAIT",
        "statestore/redis/catalog.py",
        "functions.confirm = gate.confirmation()",
        "functions.confirm = None",
        ("tests/statestore/test_redis_durability.py::test_every_acknowledged_write_is_on_a_replica[valkey-wait=1]",),
    ),
    Mutation(
        "redis-wait-counts-nothing",
        "WAIT follows with nothing written for it to count",
        "statestore/redis/connection.py",
        'commands += [*confirm.mark(f"{calls[0].key}:confirm"), confirm.command]',
        'commands += [("PING",), ("EVAL_RO", "return 1", 0), confirm.command]',
        ("tests/statestore/test_redis_durability.py::test_every_acknowledged_write_is_on_a_replica[valkey-wait=1]",),
    ),
    Mutation(
        "redis-acknowledged-heads-are-forgotten",
        "a row that knows less than was acknowledged is believed",
        "statestore/redis/acknowledged.py",
        "    if known is None:\n        return True",
        "    if known is None or found is not None:\n        return True",
        (
            "tests/statestore/test_redis_catalog.py::test_a_tail_that_the_server_lost_is_data_loss_for_whoever_knew_it[valkey]",
        ),
    ),
    Mutation(
        "redis-function-in-a-moving-slot",
        "a function runs while its slot moves",
        "statestore/redis/functions.py",
        '2, self.base, f"{self.base}:", *self',
        "1, self.base, *self",
        (
            "tests/statestore/test_redis_cluster.py::test_a_slot_that_moves_is_followed_and_no_function_runs_meanwhile[valkey]",
        ),
    ),
    Mutation(
        "redis-evicting-server",
        "a server that evicts keys is accepted",
        "statestore/redis/durability.py",
        'if facts.policy != "noeviction":',
        'if facts.policy == "noeviction?":',
        (
            "tests/statestore/test_redis_durability.py::test_an_evicting_server_is_refused_also_one_that_takes_over_later[valkey]",
        ),
    ),
    Mutation(
        "redis-lost-answer-is-asked-again",
        "a command whose answer was lost is sent again",
        "statestore/redis/server.py",
        "                    return await exchange_on(connection, commands)\n",
        "                    try:\n                        return await exchange_on(connection, commands)\n"
        "                    except Exception:\n                        await connection.disconnect(nowait=True)\n"
        "                        return await exchange_on(connection, commands)\n",
        ("tests/statestore/test_redis_catalog.py::test_a_step_whose_answer_was_lost_is_not_done_twice[valkey]",),
    ),
    Mutation(
        "redis-library-is-not-loaded-again",
        "functions that a server lost stay lost",
        "statestore/redis/functions.py",
        "            if not waiting:\n                break\n",
        "            break\n",
        ("tests/statestore/test_redis_catalog.py::test_functions_that_were_lost_are_loaded_again[valkey]",),
    ),
)
