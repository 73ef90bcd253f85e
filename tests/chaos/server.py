"""One server under chaos: the product's own serving, over engines and stores that can be turned from outside."""

import asyncio
import json
from pathlib import Path
from typing import Final

from forkpoint.clock import SystemClock
from forkpoint.config import ServerConfig, load_config
from forkpoint.errors import StoreUnavailableError
from forkpoint.server.app import TINY_MODEL, Parts, TokenizerCodec
from forkpoint.server.engine.base import Engine
from forkpoint.server.engine.open import open_engine
from forkpoint.server.main import log_json, serve_until_signal
from forkpoint.server.rpc.peerblobs import PeerBlobs
from forkpoint.server.session.ports import TextCodec
from forkpoint.statestore.open import open_blobs, open_catalog
from forkpoint.statestore.whole import is_whole
from tests.chaos.gate import Gate
from tests.chaos.knobs import KnobClock, Knobs, SlowBlobs
from tests.chaos.order import LEAKED, NO_STORE, Order
from tests.chaos.steps import SteppedCatalog, step_peers
from tests.support.hash_engine import ByteCodec, HashEngine

CONTEXT_LIMIT: Final = 1 << 16


def serve(order: Order) -> int:
    """Serve until SIGTERM; returns the exit status."""
    log_json()
    config = load_config(order.flags, environment={})
    knobs = Knobs(Path(order.knobs)) if order.knobs else None
    parts = parts_of(config, order, knobs)
    try:
        status = asyncio.run(serve_until_signal(config, parts))
    except StoreUnavailableError as error:
        print(json.dumps({"event": "no store", "node": config.node, "cause": str(error)}), flush=True)
        return NO_STORE
    leaks = leaked(parts.engine)
    print(json.dumps({"event": "pools", "node": config.node, "status": status, "leaks": leaks}), flush=True)
    return LEAKED if leaks else status


def parts_of(config: ServerConfig, order: Order, knobs: Knobs | None) -> Parts:
    """The stores that the config names, behind the knobs, and the engine that is asked for."""
    config.data.mkdir(parents=True, exist_ok=True)
    clock = SystemClock() if knobs is None else KnobClock(knobs)
    peer_blobs = PeerBlobs(is_whole, clock)
    blobs = open_blobs(config.blobs_url, config.namespace, [peer_blobs])
    engine, codec, end_ids = _engine(config, order)
    shared = not config.catalog_url.startswith("memory:")
    catalog = open_catalog(config.catalog_url, clock)
    if order.gate:
        gate = Gate(Path(order.gate))
        catalog = SteppedCatalog(catalog, gate).port
        step_peers(gate)
    return Parts(
        catalog=catalog,
        blobs=blobs if knobs is None else SlowBlobs(blobs, knobs),
        engine=engine,
        codec=codec,
        end_ids=end_ids,
        lease_catalog=(lambda: open_catalog(config.catalog_url, clock)) if shared else None,
        peer_blobs=peer_blobs,
        clock=clock,
    )


def _engine(config: ServerConfig, order: Order) -> tuple[Engine, TextCodec, tuple[int, ...]]:
    if order.engine == "hash":
        engine = HashEngine(config.slots, config.pages, context_limit=CONTEXT_LIMIT)
        engine.step_pause = order.step_pause_ms / 1000
        return engine, ByteCodec(), ()
    model, tokenizer = open_engine(
        config.model or TINY_MODEL, slots=config.slots, pages=config.pages, threads=config.threads
    )
    return model, TokenizerCodec(tokenizer), model.facts.end_ids


def leaked(engine: Engine) -> list[str]:
    """What a stopped node's engine still holds, and what its pools say is wrong."""
    if isinstance(engine, HashEngine):
        # Its pools are what its sequences take.
        return [f"sequences {sorted(engine.sequences)} are left"] if engine.sequences else []
    found = engine.check()
    capacity = engine.capacity()
    for what, free, total in (
        ("slots", capacity.slots_free, capacity.slots_total),
        ("pages", capacity.pages_free, capacity.pages_total),
    ):
        if free != total:
            found.append(f"{free} of {total} {what} are free after all sessions are gone")
    return found
