"""Tests that `make test` leaves to `make test-long`, so that it ends within ten minutes of two cores. CI runs both."""

from fnmatch import fnmatchcase
from typing import Final

LONG: Final = (
    "chaos/test_chaos.py::test_a_move_may_lose_anybody_at_every_step",
    "chaos/test_chaos.py::test_three_nodes_over_redis_keep_every_promise_whatever_goes_wrong[[]60]",
    "cli/test_demo.py::test_the_demo_ends_equal_and_shows_what_it_promises",
    "cli/test_demo.py::test_the_sabotaged_demo_ends_unequal",
    "cli/test_examples.py::test_an_example_shows_what_it_says[[]background_agent.py]",
    "cli/test_examples.py::test_an_example_shows_what_it_says[[]empty_a_node.py]",
    "client/test_resume.py::test_a_generation_and_a_follower_go_on_after_a_kill",
    "conformance/test_forks.py::test_a_chain_of_a_thousand_forks_reads_and_forks_like_a_short_one[[]*faults]",
    "crash/test_crash.py::test_a_crash_at_any_operation_in_any_shape_keeps_everything_acknowledged",
    "endtoend/test_broken_store.py::test_a_store_that_broke_for_good_ends_its_process_and_another_one_goes_on[[]catalog]",
    "endtoend/test_redis_store.py::test_servers_over_one_redis_take_over_from_each_other_after_a_kill",
    "endtoend/test_survival.py::test_a_stop_across_a_kill_is_found_and_a_late_reader_gets_all_of_it",
    "endtoend/test_survival.py::test_damaged_and_missing_blobs_cost_a_longer_replay_and_change_no_bit",
    "endtoend/test_survival.py::test_sigterm_in_the_middle_of_a_prefill_and_of_generations_with_too_few_slots",
    "engine/test_random_use.py::test_random_use_keeps_the_pools_sound_and_every_sequence_exact[[][123]]",
    "exactness/test_cuts.py::test_a_long_prompt_cut_at_random_equals_one_pass[[]k3*]",
    "exactness/test_cuts.py::test_a_prompt_cut_in_two_anywhere_equals_one_pass[[]k3*]",
    "exactness/test_forks.py::test_a_childs_tokens_never_reach_its_parent_or_its_siblings[[]k3*]",
    "exactness/test_forks.py::test_a_fork_at_any_position_continues_like_its_parent[[]k3*]",
    "exactness/test_forks.py::test_a_random_tree_of_forks_is_exact[[]k3*]",
    "exactness/test_restores.py::test_checkpoints_taken_in_a_burst_equal_those_of_a_quiet_run[[]k3*]",
    "exactness/test_restores.py::test_eviction_under_memory_pressure_is_exact[[]k3*]",
    "exactness/test_restores.py::test_replaying_a_tail_of_any_length_onto_a_checkpoint_is_exact[[]k3*]",
    "exactness/test_sampling.py::test_a_generation_interrupted_anywhere_by_a_restore_gives_the_same_tokens[[]k3*]",
    "kills/test_kills.py::test_no_kill_loses_or_changes_a_token_that_a_client_saw[[]many]",
    "kills/test_rolling.py::test_a_cluster_that_is_restarted_node_by_node_loses_and_repeats_nothing[[]sqlite*]",
    "kills/test_servers.py::test_a_full_disk_refuses_clearly_and_loses_nothing",
    "kills/test_servers.py::test_a_store_refuses_a_server_with_another_model",
    "kills/test_stopped.py::test_an_owner_that_stood_still_and_its_rival_leave_one_history",
    "rpc/test_forwarded_streams.py::test_a_generation_goes_on_when_the_process_of_its_owner_is[[]stopped]",
    "rpc/test_streams.py::test_streams_dropped_by_the_thousand_leave_nothing",
    "session/test_turns.py::test_a_thousand_sessions_opened_used_cut_short_and_closed_leave_nothing*",
    "sim/test_sim.py::test_every_promise_holds_in_some_hundred_runs_more",
    "statestore/test_gc_interleavings.py::test_a_collector_that_stalls_is_replaced_and_wakes_up_in_every_order",
    "statestore/test_redis_cluster.py::test_a_failover_by_sentinel_is_followed_and_a_lost_tail_is_data_loss[[]redis]",
    "statestore/test_redis_durability.py::test_every_acknowledged_write_is_on_a_replica[[]redis-wait=1]",
    "statestore/test_redis_durability.py::test_every_acknowledged_write_is_on_a_replica[[]valkey-waitaof=1]",
)
"""Files below tests/ and the tests in them, as shell patterns: `[[]` is the bracket that opens parameters."""


def is_long(place: str) -> bool:
    """Whether a test (`kills/test_kills.py::test_x[a]`) is one of them."""
    return any(fnmatchcase(place, pattern) for pattern in LONG)
