"""The wiring: the only place that knows every part. A config becomes a node that serves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from forkpoint.chat import Chat, PromptIds
from forkpoint.clock import Clock, SystemClock
from forkpoint.config import ServerConfig
from forkpoint.errors import ConfigError
from forkpoint.limits import SHUTDOWN_SECONDS
from forkpoint.model.digest import LoadProgress
from forkpoint.model.tokenizer import Tokenizer
from forkpoint.server.engine.base import Engine
from forkpoint.server.engine.load_log import Stoppable
from forkpoint.server.engine.open import open_engine
from forkpoint.server.rpc.channels import Channels
from forkpoint.server.rpc.forward import Forwarder
from forkpoint.server.rpc.peerblobs import PeerBlobs
from forkpoint.server.rpc.peers import GrpcPeers
from forkpoint.server.rpc.served import Served
from forkpoint.server.rpc.server import RpcServer
from forkpoint.server.session.node import Node
from forkpoint.server.session.options import NodeOptions
from forkpoint.server.session.ports import TextCodec
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.open import ExplainsDurability, open_blobs, open_catalog, shown_url
from forkpoint.statestore.records import SCHEMA_VERSION, Durability, StoreMarker
from forkpoint.statestore.retention import RetentionPolicy
from forkpoint.statestore.tiers import tiers_of
from forkpoint.statestore.whole import is_whole

TINY_MODEL: Final = Path(__file__).resolve().parent.parent / "model" / "tiny"
NODE_SHUTDOWN_SECONDS: Final = SHUTDOWN_SECONDS * 0.8
"""The sessions' part of the time from SIGTERM to exit; the rest is for calls that still run, and the process's end."""
GRACE_SECONDS: Final = 0.5
"""How long calls that still run may take once the sessions are released."""
BROKEN_LOOK_SECONDS: Final = 0.1
"""How often the stores are asked whether they broke; asking reads a field."""

_RANKS: Final = {Durability.MEMORY: 1, Durability.LOCAL_FSYNC: 2, Durability.REPLICATED: 3}


class TokenizerCodec:
    """The model's tokenizer as the session layer's TextCodec."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_text(self, text: bytes) -> list[int]:
        """Ids of UTF-8 text."""
        return self._tokenizer.encode(text)

    def render_chat(self, chat: Chat) -> PromptIds:
        """Ids of a chat."""
        return self._tokenizer.render_chat(chat)

    def token_bytes(self, token_id: int) -> bytes:
        """Text of one id."""
        return self._tokenizer.decode_bytes([token_id])


@dataclass(frozen=True, slots=True)
class Parts:
    """What a node is made of beside its config."""

    catalog: Catalog
    blobs: BlobStore
    engine: Engine
    codec: TextCodec
    end_ids: tuple[int, ...] = ()
    lease_catalog: Callable[[], Catalog] | None = None
    peer_blobs: PeerBlobs | None = None
    """A source of `blobs`, to be told which nodes there are."""
    clock: Clock = field(default_factory=SystemClock)


@dataclass(frozen=True, slots=True)
class ServingNode:
    """A node that serves, where, its two halves and its stores."""

    address: str
    node: Node
    rpc: RpcServer
    catalog: Catalog
    blobs: BlobStore

    async def store_broken(self) -> tuple[str, str]:
        """Wait until a store broke for good; which one ("catalog" or "blobs") and why. Then the node can do nothing
        more: it is to leave, and its process to be started anew."""
        while True:
            for store, cause in (("catalog", self.catalog.broken), ("blobs", self.blobs.broken)):
                if cause is not None:
                    return store, cause
            await asyncio.sleep(BROKEN_LOOK_SECONDS)


def open_parts(config: ServerConfig, progress: LoadProgress | None = None) -> Parts:
    """Load the model and open the stores that the config names. Raises ConfigError; blocks while it loads."""
    clock = SystemClock()
    config.data.mkdir(parents=True, exist_ok=True)
    catalog = open_catalog(config.catalog_url, clock)
    engine, tokenizer = open_engine(
        config.model or TINY_MODEL,
        device=config.device,
        slots=config.slots,
        pages=config.pages,
        threads=config.threads,
        cuda_graphs=config.cuda_graphs,
        sabotage=config.sabotage,
        progress=progress,
    )
    shared = config.catalog_url.partition(":")[0] != "memory"
    peer_blobs = PeerBlobs(is_whole, clock) if shared else None
    return Parts(
        catalog=catalog,
        blobs=open_blobs(config.blobs_url, config.namespace, [] if peer_blobs is None else [peer_blobs]),
        engine=engine,
        codec=TokenizerCodec(tokenizer),
        end_ids=engine.facts.end_ids,
        lease_catalog=(lambda: open_catalog(config.catalog_url, clock)) if shared else None,
        peer_blobs=peer_blobs,
        clock=clock,
    )


def check_durability(config: ServerConfig, catalog: Catalog) -> None:
    """Raises ConfigError when the store, which is open, gives less than the config asks for."""
    asked = Durability[config.durability.upper()]
    if _RANKS[catalog.durability] < _RANKS[asked]:
        why = f" ({catalog.durability_reason})" if isinstance(catalog, ExplainsDurability) else ""
        raise ConfigError(
            "durability",
            shown_url(config.catalog_url),
            f"the store reaches {catalog.durability.value.lower()}{why}, below {config.durability}; "
            f"start with durability {catalog.durability.value.lower()} if that is meant",
        )


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def node_options(config: ServerConfig, address: str, end_ids: tuple[int, ...]) -> NodeOptions:
    """What the session layer is told of the settings; `address`: where others reach the node."""
    return NodeOptions(
        node=config.node,
        address=address,
        namespace=config.namespace,
        lock_folder=config.data / "locks",
        checkpoint_every_tokens=config.checkpoint_every,
        checkpoint_on_turn_end=config.checkpoint_on_turn_end,
        prefill_chunk_tokens=config.prefill_chunk,
        stall_seconds=config.stall_seconds,
        end_ids=end_ids,
        retention=RetentionPolicy(config.keep_last, config.ladder_step),
        gc_interval_seconds=config.gc_interval_seconds,
        gc_grace_seconds=config.gc_grace_seconds,
        gc_budget_bytes=config.gc_budget_bytes,
        shutdown_seconds=NODE_SHUTDOWN_SECONDS,
    )


async def _opened(config: ServerConfig, progress: LoadProgress | None) -> Parts:
    """open_parts in a thread, which ends soon when this is cancelled: to load may take minutes."""
    stoppable = Stoppable(progress)
    try:
        return await asyncio.to_thread(open_parts, config, stoppable)
    except asyncio.CancelledError:
        stoppable.stop()
        raise


@asynccontextmanager
async def serving(
    config: ServerConfig, parts: Parts | None = None, progress: LoadProgress | None = None
) -> AsyncIterator[ServingNode]:
    """A node that serves inside the block; it drains at the block's end.

    `parts` None: open_parts(config), which tells `progress`, in another thread, how far the model is loaded. Raises
    ConfigError, StateIncompatibleError (the store is another model's).
    """
    rpc = RpcServer(config.node, stream_age_seconds=config.stream_age_seconds)
    try:
        port = rpc.bind(join_address(config.host, config.port))
    except OSError as error:
        raise ConfigError("port", f"{config.host}:{config.port}", str(error)) from error
    address = join_address(config.host, port)
    own = parts is None
    parts = await _opened(config, progress) if parts is None else parts
    facts = parts.engine.facts
    marker = StoreMarker(SCHEMA_VERSION, config.namespace, facts.model_digest, facts.tokenizer_digest)
    await parts.catalog.open(marker)
    try:
        await parts.blobs.open()
        if own:
            check_durability(config, parts.catalog)
        options = node_options(config, config.advertise or address, parts.end_ids)
        channels = Channels()
        store = CheckpointStore(parts.catalog, parts.blobs, compress=config.compress)
        node = Node(
            parts.catalog,
            store,
            parts.engine,
            parts.codec,
            options,
            marker,
            parts.clock,
            parts.lease_catalog,
            blobs=parts.blobs,
            peers=GrpcPeers(channels, config.node),
        )
        if parts.peer_blobs is not None:
            parts.peer_blobs.attach(lambda: node.others, channels)
        served = Served(
            node=config.node,
            namespace=config.namespace,
            model_digest=facts.model_digest,
            tokenizer_digest=facts.tokenizer_digest,
            vocab_size=facts.vocab_size,
            durability=parts.catalog.durability,
            checkpoint_every=config.checkpoint_every,
        )
        local = [tier.blobs for tier in tiers_of(parts.blobs) if not tier.blobs.survives_node]
        rpc.attach(node, served, parts.clock, channels, local)
        token_bytes = parts.codec.token_bytes
        rpc.forward(Forwarder(channels, node.members, config.node, options.address, parts.clock, token_bytes))
        await node.start()
        try:
            await rpc.start()
            yield ServingNode(address, node, rpc, parts.catalog, parts.blobs)
        finally:
            node.begin_leave()
            await rpc.health.stop()
            await node.move_away()
            await rpc.begin_drain()
            await node.stop()
            await rpc.stop(GRACE_SECONDS)
    finally:
        await parts.blobs.close()
        await parts.catalog.close()
