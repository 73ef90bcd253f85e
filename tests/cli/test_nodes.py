"""`forkpoint node`, `migrate`, `session tree --cluster`, `session release` and `--standbys`: what they ask and show."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from forkpoint.cli.main import main
from forkpoint.proto.forkpoint.v1 import admin_pb2, session_pb2, workflow_pb2
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from tests.support.fake_node import FakeNode, Refused, fake_node
from tests.support.rpc_nodes import nodes
from tests.support.rpc_site import Served

NAME = "workflows/w/sessions/s"
SESSION = session_pb2.Session(name=NAME, state=session_pb2.Session.GENERATING, head=1234, node="nodes/b", standbys=1)
Run = Callable[..., Any]


def node(name: str, start: int = 1, **fields: Any) -> admin_pb2.Node:
    return admin_pb2.Node(name=f"nodes/{name}", incarnation=f"{name}-{start}", address=f"{name}:1", **fields)


NODES = [
    node("a", state=admin_pb2.Node.DEAD),
    node("b", state=admin_pb2.Node.DRAINING, sessions=3, slots_total=16, slots_free=13),
    node("c", state=admin_pb2.Node.DEAD),
    node("a", 2, state=admin_pb2.Node.SERVING, waiting=2, pages_total=2048, pages_free=1024),
]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command against a node; returns its exit status, stdout and stderr."""

    async def command(to: FakeNode | Served, *arguments: str) -> tuple[int, str, str]:
        status = await asyncio.to_thread(main, [*arguments, "--address", to.address])
        out, err = capsys.readouterr()
        return status, out, err

    return command


def lines(out: str) -> list[Any]:
    return [json.loads(line) for line in out.splitlines()]


async def test_a_list_of_nodes_leaves_out_what_died_and_came_back(run: Run) -> None:
    async with fake_node(ListNodes=[[admin_pb2.ListNodesResponse(nodes=NODES)]]) as fake:
        status, out, _ = await run(fake, "node", "list")
        assert status == 0
        assert [line.split()[:2] for line in out.splitlines()[1:]] == [
            ["b", "DRAINING"],
            ["c", "DEAD"],
            ["a", "SERVING"],
        ]
        assert "13 of 16" in out and "1,024 of 2,048" in out
        shown = json.loads((await run(fake, "node", "list", "--json"))[1])
        assert [(n["incarnation"], n["state"], n["waiting"]) for n in shown] == [
            ("b-1", "DRAINING", 0),
            ("c-1", "DEAD", 0),
            ("a-2", "SERVING", 2),
        ]
        assert len(json.loads((await run(fake, "node", "list", "--json", "--all"))[1])) == 4


async def test_a_command_takes_several_addresses_of_which_some_are_dead(run: Run) -> None:
    async with fake_node(UndrainNode=[[NODES[3]]]) as fake:
        fake.address = f"127.0.0.1:1,{fake.address}"
        assert "SERVING" in (await run(fake, "node", "undrain", "a"))[1]


async def test_a_watch_shows_each_change_as_it_comes(run: Run) -> None:
    events = [*(admin_pb2.NodeEvent(node=n) for n in NODES[1:3]), admin_pb2.NodeEvent(node=NODES[1], gone=True)]
    async with fake_node(WatchNodes=[events]) as fake:
        status, out, _ = await run(fake, "node", "watch")
        assert (status, out.splitlines()[0]) == (
            0,
            "b  DRAINING, 3 sessions, 0 waiting, 0 followed, 13 of 16 slots free",
        )
        assert out.splitlines()[-1] == "b  gone (b-1)"
        shown = lines((await run(fake, "node", "watch", "--json"))[1])
        assert [(e["name"], e["gone"]) for e in shown] == [("nodes/b", False), ("nodes/c", False), ("nodes/b", True)]


@pytest.mark.parametrize(("left", "status"), [(0, 0), (2, 1)])
async def test_a_drain_tells_how_far_it_is_and_fails_when_sessions_are_left(run: Run, left: int, status: int) -> None:
    events = [
        admin_pb2.DrainProgress(sessions_left=5),
        admin_pb2.DrainProgress(sessions_left=left, sessions_moved=3, sessions_parked=1),
    ]
    async with fake_node(DrainNode=[events], UndrainNode=[[NODES[3]]]) as fake:
        done, out, _ = await run(fake, "node", "drain", "b")
        assert (done, out.splitlines()) == (
            status,
            ["0 moved, 0 parked, 5 left", f"3 moved, 1 parked, {left} left"],
        )
        done, out, _ = await run(fake, "node", "drain", "nodes/b", "--json")
        assert done == status
        assert lines(out)[-1] == {"sessions_left": left, "sessions_moved": 3, "sessions_parked": 1}
        assert "SERVING" in (await run(fake, "node", "undrain", "a"))[1]
        assert json.loads((await run(fake, "node", "undrain", "a", "--json"))[1])["incarnation"] == "a-2"
        assert [request.name for _, request, _ in fake.calls] == ["nodes/b", "nodes/b", "nodes/a", "nodes/a"]


async def test_a_rebalance_names_each_move_and_fails_when_one_did(run: Run) -> None:
    move = admin_pb2.RebalanceProgress(name=NAME, source_node="nodes/b", target_node="nodes/a", moved=True)
    stays = admin_pb2.RebalanceProgress(name=NAME, source_node="nodes/b", target_node="nodes/a", problem="no room")
    async with fake_node(Rebalance=[[move], [move], [move, stays], [move, stays], []]) as fake:
        assert (await run(fake, "node", "rebalance"))[:2] == (0, "w/s moved from b to a\n")
        dry = await run(fake, "node", "rebalance", "--dry-run", "--moves-max", "4")
        assert dry[:2] == (0, "w/s would move from b to a\n")
        assert (fake.calls[-1][1].dry_run, fake.calls[-1][1].moves_max) == (True, 4)
        status, out, _ = await run(fake, "node", "rebalance")
        assert (status, out.splitlines()[-1]) == (1, "w/s stays on b: no room")
        status, out, _ = await run(fake, "node", "rebalance", "--json")
        assert (status, [(m["moved"], m["problem"]) for m in lines(out)]) == (1, [(True, ""), (False, "no room")])
        assert (await run(fake, "node", "rebalance"))[:2] == (0, "nothing to move\n")


async def test_a_migration_tells_its_phases_and_the_pause(run: Run) -> None:
    phases = admin_pb2.MigrateProgress
    events = [
        phases(phase=phases.RESTORING, target_node="nodes/b"),
        phases(phase=phases.REPLAYING, target_node="nodes/b", restored_tokens=1024, lag_tokens=200),
        phases(phase=phases.REPLAYING, target_node="nodes/b", restored_tokens=1024, lag_tokens=20),
        phases(phase=phases.MOVED, target_node="nodes/b", session=SESSION, pause=Duration(nanos=12_500_000)),
    ]
    async with fake_node(MigrateSession=[events, events, events[:2]]) as fake:
        status, out, _ = await run(fake, "migrate", "w/s", "--to", "b")
        assert (status, out.splitlines()) == (
            0,
            [
                "w/s: restoring on b, 0 tokens restored, 0 behind",
                "w/s: replaying on b, 1,024 tokens restored, 200 behind",
                "w/s: on b, no token for 12.5 ms",
            ],
        )
        status, out, _ = await run(fake, "migrate", "w/s", "--json")
        assert [event["lag_tokens"] for event in lines(out)] == [0, 200, 20, 0]
        assert (lines(out)[-1]["session"]["node"], lines(out)[-1]["pause_s"]) == ("nodes/b", 0.0125)
        assert [request.target_node for _, request, _ in fake.calls] == ["nodes/b", ""]
        status, _, err = await run(fake, "migrate", "w/s")
        assert (status, err) == (1, "error: MOVE_FAILED: the call ended before w/s had moved\n")


async def test_a_refused_move_is_one_line(run: Run) -> None:
    refused = Refused(grpc.StatusCode.FAILED_PRECONDITION, "MOVE_FAILED")
    async with fake_node(MigrateSession=[[refused]]) as fake:
        status, out, err = await run(fake, "migrate", "w/s", "--to", "b")
        assert (status, out, err) == (1, "", "error: MOVE_FAILED: MOVE_FAILED\n")
        assert (await run(fake, "migrate", "nonsense"))[0] == 1
        assert len(fake.calls) == 1


async def test_a_tree_of_the_cluster_says_where_each_session_is(run: Run) -> None:
    def session(name: str, **fields: Any) -> session_pb2.Session:
        return session_pb2.Session(name=f"workflows/w/sessions/{name}", **fields)

    active, generating = session_pb2.Session.ACTIVE, session_pb2.Session.GENERATING
    tree = pb.ListSessionsResponse(
        sessions=[
            session("s", state=active, head=1234, node="nodes/a"),
            session("t", state=generating, head=2000, node="nodes/b", parent=NAME, fork_position=1000),
            session("u", state=active, head=1000, parent=NAME, fork_position=1000),
            session("v", state=active, head=7, node="nodes/x"),
        ]
    )
    async with fake_node(ListSessions=[[tree]], ListNodes=[[admin_pb2.ListNodesResponse(nodes=NODES)]]) as fake:
        assert (await run(fake, "session", "tree", "w", "--cluster"))[1].splitlines() == [
            "w/s  ACTIVE, 1,234 tokens, on a",
            "├── w/t  GENERATING, 2,000 tokens, from 1,000, on b (draining)",
            "└── w/u  ACTIVE, 1,000 tokens, from 1,000, on no node",
            "w/v  ACTIVE, 7 tokens, on x (unknown)",
        ]
        shown = json.loads((await run(fake, "session", "tree", "w", "--cluster", "--json"))[1])
        assert [(s["node"], s["node_state"]) for s in shown] == [
            ("nodes/a", "SERVING"),
            ("nodes/b", "DRAINING"),
            ("", ""),
            ("nodes/x", ""),
        ]
        calls = len(fake.calls)
        assert "on a" not in (await run(fake, "session", "tree", "w"))[1]
        assert fake.methods()[calls:] == ["ListSessions"], "a plain tree asks for no nodes"


async def test_standbys_are_asked_for_and_shown_and_a_session_is_released(run: Run) -> None:
    workflow = workflow_pb2.Workflow(name="workflows/w", standbys=2)
    script: dict[str, Sequence[Any]] = {
        **{method: [[SESSION]] for method in ("CreateSession", "UpdateSession", "GetSession", "ReleaseQuarantine")},
        **{method: [[workflow]] for method in ("CreateWorkflow", "UpdateWorkflow")},
    }
    async with fake_node(**script) as fake:
        _, out, _ = await run(fake, "session", "create", "w/s", "--standbys", "1", "--json")
        assert json.loads(out)["standbys"] == 1
        await run(fake, "session", "update", "w/s", "--standbys", "0", "--no-on-turn-end", "--label", "a=b")
        created, updated = (r for m, r, _ in fake.calls if m in ("CreateSession", "UpdateSession"))
        assert created.session.standbys == 1
        paths = ["labels", "checkpoint_policy.on_turn_end", "standbys"]
        assert (updated.update_mask.paths, updated.session.standbys) == (paths, 0)
        assert json.loads((await run(fake, "session", "release", "w/s", "--json"))[1])["name"] == NAME
        assert json.loads((await run(fake, "workflow", "create", "w", "--standbys", "2", "--json"))[1])["standbys"] == 2
        assert (await run(fake, "workflow", "update", "w", "--standbys", "0"))[1] == "w\n"
        created, updated = (r for m, r, _ in fake.calls if m in ("CreateWorkflow", "UpdateWorkflow"))
        assert (created.workflow.standbys, updated.workflow.standbys) == (2, 0)
        assert updated.update_mask.paths == ["standbys"], "labels that were not given stay"
        for verb in ("session", "workflow"):
            status, _, err = await run(fake, verb, "update", "w/s" if verb == "session" else "w")
            assert (status, err.startswith("error: INVALID_FIELD: ")) == (1, True)


async def test_the_commands_do_what_they_say_to_real_nodes(run: Run, tmp_path: Path) -> None:
    async with asyncio.timeout(120), nodes(tmp_path, "ab") as two:
        a, b = two.by_name["a"], two.by_name["b"]
        parent = await a.session(text="hello")
        (child,) = await parent.fork(session_ids=["t"])
        await child.append(text="!")
        assert [n["state"] for n in json.loads((await run(b, "node", "list", "--json"))[1])] == ["SERVING"] * 2
        status, out, _ = await run(b, "migrate", "w/s", "--to", "b")
        assert (status, out.splitlines()[-1].partition(",")[0]) == (0, "w/s: on b")
        tree = (await run(a, "session", "tree", "w", "--cluster"))[1].splitlines()
        assert tree == ["w/s  ACTIVE, 5 tokens, on b", "└── w/t  ACTIVE, 6 tokens, from 5, on a"]
        status, out, _ = await run(a, "node", "drain", "b")
        assert (status, out.splitlines()[-1]) == (0, "1 moved, 0 parked, 0 left")
        assert (await run(b, "session", "tree", "w", "--cluster"))[1].splitlines()[0].endswith("on a")
        assert "DRAINING" in (await run(a, "node", "list"))[1]
        assert json.loads((await run(a, "node", "undrain", "b", "--json"))[1])["state"] == "SERVING"
        assert (await run(a, "node", "rebalance", "--dry-run"))[0] == 0
        assert "error: NOT_FOUND: nodes/nobody" in (await run(a, "migrate", "w/s", "--to", "nobody"))[2]
        assert (await run(a, "session", "release", "w/s"))[0] == 1
