"""The serving process: its line, its port file, its logs, its signals; and what keeps it from starting."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import apsw
import pytest

from forkpoint.client.client import Client
from forkpoint.config import ServerConfig
from forkpoint.errors import ConfigError
from forkpoint.proto.forkpoint.v1 import session_pb2
from forkpoint.server import app
from forkpoint.server.app import TINY_MODEL, Parts, check_durability, join_address, serving
from forkpoint.server.main import JsonLines
from forkpoint.statestore.open import open_catalog
from tests.support.rpc_site import ROOT, config_for, parts_for, served, server_process, settled


async def test_sigterm_checkpoints_every_session_and_exits_well(tmp_path: Path) -> None:
    with server_process(tmp_path, step_pause=0.005) as server:
        async with Client(server.address) as client:
            await client.workflows.create("w")
            sessions = [await client.sessions.create("w", f"s{index}") for index in range(3)]
            for letter, session in zip("abc", sessions, strict=True):
                await session.append(text=letter * 40)
                await settled(session)
            generation = sessions[0].generate(max_tokens=5000, patience_s=0.1)
            await anext(generation)
            assert server.terminate() == 0
    async with served(tmp_path, workflow=False) as site:
        for session in sessions:
            again = site.client.sessions.open(session.name)
            made = [checkpoint async for checkpoint in site.client.checkpoints.list(session.name)]
            assert made and made[-1].grid_position >= 32
            assert (await again.get()).head >= 40
        await site.client.sessions.open(sessions[0].name).cancel_generation()
        assert (await site.client.sessions.open(sessions[1].name).get()).state == session_pb2.Session.ACTIVE


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    with server_process(tmp_path, step_pause=3.0) as server:
        program = (
            "import asyncio, sys\n"
            "from forkpoint.client.client import Client\n"
            "async def main():\n"
            "    async with Client(sys.argv[1]) as client:\n"
            "        await client.workflows.create('w')\n"
            "        session = await client.sessions.create('w', 's')\n"
            "        await session.append(text='hello')\n"
            "asyncio.run(main())\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        subprocess.run([sys.executable, "-c", program, server.address], env=environment, check=True)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=10) in (0, 1)


def test_a_drain_that_hangs_is_cut_off_and_does_not_say_that_all_went_well(tmp_path: Path) -> None:
    """Somebody holds the store's lock, so nothing can be checkpointed or released."""
    program = (
        "import forkpoint.server.main, tests.support.hash_server\n"
        "forkpoint.server.main.WATCHDOG_SECONDS = 0.5\n"
        "tests.support.hash_server.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), "0", "0", str(tmp_path / "port")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and '"serving"' in process.stdout.readline()
    holder = apsw.Connection(str(tmp_path / "catalog.sqlite"))
    try:
        holder.execute("BEGIN IMMEDIATE")
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=10)
    finally:
        holder.close()
    assert (process.returncode, "was cut off" in log) == (1, True)
    with server_process(tmp_path) as server:
        assert server.terminate() == 0


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    async with served(tmp_path / "a") as site:
        config = config_for(tmp_path / "b", port=int(site.address.rpartition(":")[2]))
        with pytest.raises(ConfigError) as error:
            async with serving(config, parts_for(config)):
                pass
        assert error.value.key == "port"


async def test_a_node_that_is_to_end_while_its_model_loads_ends_at_the_next_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, ended = threading.Event(), threading.Event()
    told: list[tuple[int, int]] = []

    def load(config: ServerConfig, progress: Callable[[int, int], None]) -> Parts:
        try:
            for done in range(10**9):
                progress(done, 10**9)
                loading.set()
        finally:
            ended.set()
        raise AssertionError("nobody stopped it")

    monkeypatch.setattr(app, "open_parts", load)

    async def serve() -> None:
        async with serving(config_for(tmp_path), progress=lambda *counts: told.append(counts)):
            pass

    task = asyncio.get_running_loop().create_task(serve())  # owner: this test
    assert await asyncio.to_thread(loading.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 10)
    assert told[0] == (0, 10**9)


async def test_a_store_below_the_asked_durability_keeps_the_node_from_starting(tmp_path: Path) -> None:
    config = config_for(tmp_path, catalog="memory://")
    with pytest.raises(ConfigError) as error:
        check_durability(config, open_catalog(config.catalog_url))
    assert error.value.key == "durability"
    check_durability(replace(config, durability="memory"), open_catalog(config.catalog_url))
    check_durability(config_for(tmp_path), open_catalog(config_for(tmp_path).catalog_url))
    async with served(tmp_path, catalog="memory://", blobs="memory://", durability="memory") as site:
        session = await site.session()
        answer = await session.append(text="x", durability="MEMORY")
        assert answer.durability == 1


async def test_a_node_that_stopped_leaves_no_row(tmp_path: Path) -> None:
    async with served(tmp_path):
        pass
    async with served(tmp_path, workflow=False, node="next") as site:
        assert [node.name async for node in site.client.nodes.list()] == ["nodes/next"]


def test_addresses_with_colons_get_brackets() -> None:
    assert [join_address(host, 1) for host in ("h", "::1", "[::1]")] == ["h:1", "[::1]:1", "[::1]:1"]


def test_the_tiny_model_lies_where_the_node_looks() -> None:
    assert (TINY_MODEL / "config.json").is_file()
    assert ServerConfig().model is None


def test_log_lines_are_json_without_the_texts_of_errors() -> None:
    formatter = JsonLines()
    record = logging.LogRecord("forkpoint.x", logging.WARNING, "f", 1, "what %s", ("happened",), None)
    record.facts = {"session": "s", "epoch": 3}
    line = json.loads(formatter.format(record))
    assert (line["level"], line["logger"], line["message"]) == ("warning", "forkpoint.x", "what happened")
    assert (line["session"], line["epoch"]) == ("s", 3)
    try:
        raise KeyError("secret tokens")
    except KeyError:
        record = logging.LogRecord("forkpoint.x", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    text = formatter.format(record)
    assert json.loads(text)["error"] == "KeyError"
    assert "secret" not in text and "test_log_lines" in text
