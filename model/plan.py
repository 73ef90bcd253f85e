"""Memory arithmetic, to the byte: what sessions of a model take on the device and in the store. Needs no torch."""

from dataclasses import dataclass, fields
from typing import Final, Literal

from forkpoint.limits import PAGE_TOKENS, TILE_TOKENS
from forkpoint.model.config import ModelConfig, ModelConfigError
from forkpoint.model.geometries import GEOMETRIES, geometry
from forkpoint.model.layout import StateDtypes, StateLayout
from forkpoint.parts import ITEM_BYTES

__all__ = ["DTYPE_NAMES", "GEOMETRIES", "CheckpointBytes", "MemoryPlan", "SlotBytes", "geometry", "make_plan"]

DTYPE_NAMES: Final = {"fp32": "float32", "bf16": "bfloat16"}
"""How the command line spells the dtypes of a plan."""


@dataclass(frozen=True, slots=True)
class SlotBytes:
    """Bytes of one session's slot, by what they hold, all KDA layers."""

    state: int
    """S."""
    open_tile: int
    """The open tile: factors of its products with bf16 activations, else k, v, log decays and beta."""
    conv_live: int
    conv_grid: int
    norm_rows: int

    @property
    def total(self) -> int:
        return self.state + self.open_tile + self.conv_live + self.conv_grid + self.norm_rows


@dataclass(frozen=True, slots=True)
class CheckpointBytes:
    """Raw bytes of checkpoints, by what they hold. Latents are counted once, however many checkpoints share a page."""

    state: int
    conv: int
    latents: int

    @property
    def total(self) -> int:
        return self.state + self.conv + self.latents


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes for `sessions` sessions of `tokens` tokens each. Fields without another word are for one session."""

    model: str
    tokens: int
    sessions: int
    checkpoint_every: int
    kda_dtype: str
    activation_dtype: str
    kda_layers: int
    mla_layers: int
    slot: SlotBytes
    latent_bytes_per_token: int
    latents: int
    """Latents of `tokens` tokens, without what the last page leaves unused."""
    pages: int
    page_bytes: int
    checkpoint: CheckpointBytes
    """One checkpoint at the last grid point of `tokens`."""
    checkpoints: int
    """Number of checkpoints of one session, one every `checkpoint_every` tokens."""
    all_checkpoints: CheckpointBytes
    """All of one session's checkpoints: S and conv tails of each, each page's latents once. A partial last page of a
    checkpoint inside a page is its own blob and counts besides."""
    all_mla_bytes_per_token: int
    """If every layer were MLA."""
    all_mla: int

    @property
    def hybrid(self) -> int:
        """S and latents of one session: what compares with `all_mla`, as published figures do."""
        return self.slot.state + self.latents

    @property
    def hybrid_saving(self) -> float:
        """Share of `all_mla` that the hybrid saves, 0.726 for 72.6 %."""
        return 1 - self.hybrid / self.all_mla if self.all_mla else 0.0

    @property
    def live_with_checkpoint_states(self) -> int:
        """`hybrid` and S of every checkpoint: the live cache beside its whole history."""
        return self.hybrid + self.all_checkpoints.state

    @property
    def device_session(self) -> int:
        """Device bytes of one session: its slot and its whole pages."""
        return self.slot.total + self.pages * self.page_bytes

    @property
    def device_total(self) -> int:
        """Device bytes of all sessions, none sharing pages."""
        return self.sessions * self.device_session

    @property
    def store_total(self) -> int:
        """Store bytes of all sessions' checkpoints, raw, none sharing blobs."""
        return self.sessions * self.all_checkpoints.total

    def as_dict(self) -> dict[str, object]:
        """Every figure by name, nested groups flattened with a dot: for `--json` and for tables."""
        out: dict[str, object] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, SlotBytes | CheckpointBytes):
                parts = {inner.name: getattr(value, inner.name) for inner in fields(value)} | {"total": value.total}
                out |= {f"{entry.name}.{name}": part for name, part in parts.items()}
            else:
                out[entry.name] = value
        names = (
            "hybrid",
            "hybrid_saving",
            "live_with_checkpoint_states",
            "device_session",
            "device_total",
            "store_total",
        )
        return out | {name: getattr(self, name) for name in names}


def make_plan(
    config: ModelConfig,
    tokens: int,
    kda_dtype: str = "fp32",
    activation_dtype: str = "bf16",
    checkpoint_every: int = 512,
    sessions: int = 1,
) -> MemoryPlan:
    """Plan for a model's geometry. Dtypes are `fp32` or `bf16`; `activation_dtype` is that of conv tails, open
    tiles and latents: bf16 is a GPU's, whose kernels keep an open tile as factors, fp32 a CPU's, which keep its rows.
    Raises ModelConfigError for a number that makes no plan, naming it."""
    for name, dtype in (("kda_dtype", kda_dtype), ("activation_dtype", activation_dtype)):
        if dtype not in DTYPE_NAMES:
            raise ModelConfigError(name, "plan", f"{dtype!r} is not one of {sorted(DTYPE_NAMES)}")
    if not 0 <= tokens <= config.context_limit:
        raise ModelConfigError("tokens", "plan", f"{tokens} is outside 0..{config.context_limit}, the context limit")
    if checkpoint_every < TILE_TOKENS or checkpoint_every % TILE_TOKENS:
        raise ModelConfigError("checkpoint_every", "plan", f"{checkpoint_every} is not a multiple of {TILE_TOKENS}")
    if sessions < 1:
        raise ModelConfigError("sessions", "plan", f"{sessions} is not positive")
    opened: Literal["rows", "factors"] = "factors" if activation_dtype == "bf16" else "rows"
    layout = StateLayout(config, StateDtypes(DTYPE_NAMES[kda_dtype], DTYPE_NAMES[activation_dtype], opened))
    slot = _slot_bytes(layout)
    per_token, grid = layout.latent_bytes_per_token(), tokens // TILE_TOKENS * TILE_TOKENS
    every_layer = config.num_layers * config.latent_dim * ITEM_BYTES[DTYPE_NAMES[activation_dtype]]
    positions = range(checkpoint_every, tokens + 1, checkpoint_every)
    return MemoryPlan(
        model=config.source,
        tokens=tokens,
        sessions=sessions,
        checkpoint_every=checkpoint_every,
        kda_dtype=kda_dtype,
        activation_dtype=activation_dtype,
        kda_layers=len(config.kda_layers),
        mla_layers=len(config.mla_layers),
        slot=slot,
        latent_bytes_per_token=per_token,
        latents=per_token * tokens,
        pages=layout.pages_for(tokens),
        page_bytes=layout.page_bytes(),
        checkpoint=CheckpointBytes(slot.state, slot.conv_grid, per_token * grid),
        checkpoints=len(positions),
        all_checkpoints=CheckpointBytes(
            slot.state * len(positions),
            slot.conv_grid * len(positions),
            per_token * _stored_latents(positions),
        ),
        all_mla_bytes_per_token=every_layer,
        all_mla=every_layer * tokens,
    )


def _slot_bytes(layout: StateLayout) -> SlotBytes:
    sizes = {name: spec.nbytes for name, spec in layout.slot_tensors.items()}
    return SlotBytes(
        state=sizes.pop("S"),
        conv_live=sizes.pop("conv_ring"),
        conv_grid=sizes.pop("conv_grid"),
        norm_rows=sizes.pop("norm_rows"),
        open_tile=sum(sizes.values()),
    )


def _stored_latents(positions: range) -> int:
    """Tokens whose latents the checkpoints at `positions` store: whole pages once, each partial page for itself."""
    if not positions:
        return 0
    whole = positions[-1] // PAGE_TOKENS * PAGE_TOKENS
    return whole + sum(position % PAGE_TOKENS for position in positions)
