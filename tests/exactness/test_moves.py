"""A session that moves between nodes has, to the bit, the state and the tokens of one that never moved: the real model,
compared over everything that a slot holds."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from forkpoint.ids import SessionName
from forkpoint.server.app import TINY_MODEL
from forkpoint.server.engine.batch import Sample
from forkpoint.server.engine.open import open_engine
from forkpoint.server.engine.runner import TorchEngine
from forkpoint.server.session.api import AppendCall, CreateSession, GenerateCall, Input
from forkpoint.server.session.node import Node
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.records import SCHEMA_VERSION, StoreMarker, WorkflowRow
from tests.support.engines import consume, generate, state_digest
from tests.support.hash_engine import ByteCodec
from tests.support.near_peers import Street
from tests.support.session_site import FAST, Read, key, until

COUNT = 40
TEXT = b"def total(values):\n    result = 0\n    for value in values:\n        result = result + value\n    return 7\n"


class Pair:
    """Two nodes over one store, each with the tiny model."""

    def __init__(self, folder: Path) -> None:
        self.catalog, self.blobs, self.street = MemoryCatalog(), MemoryBlobs(), Street()
        self.folder = folder
        self.engines: list[TorchEngine] = []
        self.nodes: list[Node] = []

    async def start(self) -> None:
        for number in range(2):
            engine, _ = open_engine(TINY_MODEL, slots=3, pages=16)
            assert isinstance(engine, TorchEngine)
            marker = StoreMarker(SCHEMA_VERSION, "default", engine.facts.model_digest, engine.facts.tokenizer_digest)
            await self.catalog.open(marker)
            # A slow machine is no dead node.
            options = replace(FAST, node=f"n{number}", address=f"host:{number}", lease_ttl_seconds=20.0)
            store = CheckpointStore(self.catalog, self.blobs)
            peers = self.street.peers(options.address)
            node = Node(self.catalog, store, engine, ByteCodec(), options, marker, peers=peers)
            await node.start()
            self.street.nodes[options.address] = node
            self.engines.append(engine)
            self.nodes.append(node)
        await self.nodes[0].create_workflow(WorkflowRow("w"), None)
        await until(lambda: all(len(node.others) == 1 for node in self.nodes))

    async def stop(self) -> None:
        for node, engine in zip(self.nodes, self.engines, strict=True):
            await node.stop()
            assert engine.check() == [] and engine.capacity().slots_free == 3


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    found = Pair(tmp_path)
    await found.start()
    yield found
    await found.stop()


@pytest.mark.parametrize(("length", "temperature"), [(15, 0.0), (97, 0.8)])
async def test_a_session_that_moved_twice_equals_one_that_never_moved(
    pair: Pair, length: int, temperature: float
) -> None:
    name, prompt = SessionName("w", "s"), TEXT[:length]
    await pair.nodes[0].create_session(CreateSession(name, 11))
    await pair.nodes[0].append(AppendCall(name, Input(token_ids=tuple(prompt))))
    read = Read()
    call = GenerateCall(name, key("g"), max_tokens=COUNT, temperature=temperature, seed=11, logprobs=True)
    here = 0

    async def listen() -> None:
        nonlocal call
        while read.finished is None:
            if read.started is not None:
                call = replace(call, resume_position=read.position)
            try:
                async for event in pair.nodes[here].generate(call):
                    if read.started is None or not hasattr(event, "row"):
                        read.take(event)
            except Exception:  # noqa: BLE001 - it is on its way, or there
                await asyncio.sleep(0.01)

    listening = asyncio.get_running_loop().create_task(listen())  # owner: this test
    for at in (5, 20):
        await until(lambda at=at: len(read.tokens) >= at)  # type: ignore[misc]
        async for _ in pair.nodes[here].migrate(name, f"n{1 - here}"):
            pass
        here = 1 - here
    await asyncio.wait_for(listening, 30)
    live = pair.nodes[here]._core.lives[name]
    await until(lambda: live.consumed == live.head)

    alone, _ = open_engine(TINY_MODEL, slots=1, pages=16)
    assert isinstance(alone, TorchEngine)
    sequence = alone.create()
    consume(alone, sequence, prompt)
    expected = generate(alone, sequence, COUNT, Sample(temperature, 0, 1.0, 0.0, 11, True))
    assert list(zip(read.tokens, read.logprobs, strict=True)) == expected
    consume(alone, sequence, read.tokens[-1:])
    assert live.sequence is not None and live.consumed == length + COUNT
    assert state_digest(pair.engines[here], live.sequence) == state_digest(alone, sequence)
