"""StateLayout: the only place that knows the shapes of a session's state. No tensors here, so `plan` needs no torch.

What a slot holds, for every KDA layer: S at the last grid point; the open tile's rows (k, v, log decay, beta, or the
factors of its products, as the kernels want them); the live conv ring (four inputs, addressed by position) and the grid
conv tail (three inputs before the last grid point); and, once a slot, the final-norm rows of the last two consumed
positions. A page holds 64 tokens' latents of all MLA layers. A checkpoint holds S, the grid conv tails and the latents
before its grid point, and nothing else.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from forkpoint.limits import NORM_ROWS, PAGE_TOKENS, TILE_TOKENS
from forkpoint.model.config import CONV_TAPS, ModelConfig
from forkpoint.parts import ITEM_BYTES, PartSpec

HEAD_GROUPS_MAX: Final = 8
"""A KDA layer's parts are cut in up to eight head groups, so that tensor-parallel ranks read only their own."""
DECAY_DTYPE: Final = "int32"
BETA_DTYPE: Final = "float32"
"""log2 decays are exact integers and beta is computed in fp32, whatever the activations' dtype."""
OPEN_SUMS: Final = ("total", "reference")
"""Factors of an open tile that are no rows but run along with them: the sum of its log2 decays, and its reference."""


@dataclass(frozen=True, slots=True)
class StateDtypes:
    """Dtypes of the state, as PartSpec spells them: `kda` of S; `activation` of conv inputs, rows and latents.

    `opened`: what a slot keeps of its open tile. "rows" for the plain-torch kernels: k, v, log decay and beta.
    "factors" for the Triton ones (OpenFactors in kernels/kda/triton/state.py). No checkpoint holds either.
    """

    kda: str = "float32"
    activation: str = "float32"
    opened: Literal["rows", "factors"] = "rows"

    def __post_init__(self) -> None:
        for name in (self.kda, self.activation):
            if name not in ITEM_BYTES:
                raise ValueError(f"unknown dtype {name!r}, expected one of {sorted(ITEM_BYTES)}")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype and shape of one tensor of a slot (without the slot axis)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KdaPart:
    """Where a KDA part lies: layer ordinal among the KDA layers, what it is, and its heads [first, last)."""

    ordinal: int
    kind: str
    first_head: int
    last_head: int


@dataclass(frozen=True)
class StateLayout:
    """Shapes, dtypes and sizes of a session's state under one model config.

    Positions of checkpoints are multiples of 16; other positions raise ValueError.
    """

    config: ModelConfig
    dtypes: StateDtypes = StateDtypes()

    @cached_property
    def head_groups(self) -> int:
        """Number of head groups a KDA layer's parts are cut in: gcd(8, heads)."""
        return math.gcd(HEAD_GROUPS_MAX, self.config.kda_heads)

    @cached_property
    def slot_tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor of a slot by name. KDA tensors lead with the KDA layers axis, those of the open tile are named
        `open_...`."""
        c, act = self.config, self.dtypes.activation
        layers, heads, key, value = len(c.kda_layers), c.kda_heads, c.kda_key_dim, c.kda_value_dim
        keys, values = (layers, TILE_TOKENS, heads, key), (layers, TILE_TOKENS, heads, value)
        opened = {
            "open_v": TensorSpec(act, values),
            "open_beta": TensorSpec(BETA_DTYPE, (layers, TILE_TOKENS, heads)),
        }
        if self.dtypes.opened == "rows":
            opened |= {"open_k": TensorSpec(act, keys), "open_g": TensorSpec(DECAY_DTYPE, keys)}
        else:
            opened |= {f"open_{side}": TensorSpec(act, keys) for side in ("left", "right")}
            opened |= {f"open_{sum_}": TensorSpec(DECAY_DTYPE, (layers, heads, key)) for sum_ in OPEN_SUMS}
        return {
            "S": TensorSpec(self.dtypes.kda, (layers, heads, value, key)),
            **opened,
            "conv_ring": TensorSpec(act, (layers, CONV_TAPS, c.conv_channels)),
            "conv_grid": TensorSpec(act, (layers, CONV_TAPS - 1, c.conv_channels)),
            "norm_rows": TensorSpec(act, (NORM_ROWS, c.hidden_size)),
        }

    @cached_property
    def overwritten(self) -> tuple[str, ...]:
        """Tensors of a slot that a single token changes at places which its position does not tell: what is in them
        afterwards says nothing of what was there before."""
        sums = tuple(f"open_{name}" for name in OPEN_SUMS)
        return ("norm_rows", *(name for name in sums if name in self.slot_tensors))

    @cached_property
    def page_tensor(self) -> TensorSpec:
        """One page: [MLA layers, 64, latent + rope key]."""
        return TensorSpec(self.dtypes.activation, (len(self.config.mla_layers), PAGE_TOKENS, self.config.latent_dim))

    def slot_bytes(self) -> int:
        """Bytes of one slot: S, open tile, both conv tails, norm rows."""
        return sum(spec.nbytes for spec in self.slot_tensors.values())

    def page_bytes(self) -> int:
        """Bytes of one page, all MLA layers."""
        return self.page_tensor.nbytes

    def latent_bytes_per_token(self) -> int:
        """Bytes of MLA latents a token, all MLA layers."""
        return len(self.config.mla_layers) * self.config.latent_dim * ITEM_BYTES[self.dtypes.activation]

    def pages_for(self, position: int) -> int:
        """Pages that hold the latents of tokens [0, position)."""
        return -(-position // PAGE_TOKENS)

    def checkpoint_bytes(self, position: int) -> int:
        """Raw bytes of all parts of the checkpoint at grid position `position`."""
        fixed = self.slot_tensors["S"].nbytes + self.slot_tensors["conv_grid"].nbytes
        return fixed + self.latent_bytes_per_token() * self._on_grid(position)

    def parts(self, position: int) -> tuple[PartSpec, ...]:
        """The parts of the checkpoint at grid position `position`: KDA parts layer by layer, then pages, ascending."""
        self._on_grid(position)
        pages = tuple(
            PartSpec(
                f"mla.page.{index:06d}",
                self.dtypes.activation,
                (self.page_tensor.shape[0], self.page_rows(index, position), self.config.latent_dim),
            )
            for index in range(self.pages_for(position))
        )
        return self._kda_parts + pages

    def settled_parts(self, position: int) -> tuple[str, ...]:
        """Names of the parts at `position` that are the same at every later one: full pages."""
        full = self._on_grid(position) // PAGE_TOKENS * PAGE_TOKENS
        return tuple(f"mla.page.{index:06d}" for index in range(self.pages_for(full)))

    def page_rows(self, page_index: int, position: int) -> int:
        """Valid rows of a session's page number `page_index` at `position`."""
        return max(0, min(PAGE_TOKENS, position - page_index * PAGE_TOKENS))

    @cached_property
    def _kda_parts(self) -> tuple[PartSpec, ...]:
        c, heads = self.config, self.config.kda_heads // self.head_groups
        state = (heads, c.kda_value_dim, c.kda_key_dim)
        conv = (CONV_TAPS - 1, heads * (2 * c.kda_key_dim + c.kda_value_dim))
        return tuple(
            spec
            for layer in c.kda_layers
            for group in range(self.head_groups)
            for spec in (
                PartSpec(f"kda.{layer:03d}.state.{group}", self.dtypes.kda, state),
                PartSpec(f"kda.{layer:03d}.conv.{group}", self.dtypes.activation, conv),
            )
        )

    @cached_property
    def kda_part_places(self) -> Mapping[str, KdaPart]:
        """Place of every KDA part by name."""
        heads = self.config.kda_heads // self.head_groups
        return {
            f"kda.{layer:03d}.{kind}.{group}": KdaPart(ordinal, kind, group * heads, (group + 1) * heads)
            for ordinal, layer in enumerate(self.config.kda_layers)
            for group in range(self.head_groups)
            for kind in ("state", "conv")
        }

    def conv_channel_ranges(self, first_head: int, last_head: int) -> tuple[tuple[int, int], ...]:
        """Channel ranges [first, last) of q, k and v of the heads [first_head, last_head)."""
        c = self.config
        keys, key, value = c.kda_heads * c.kda_key_dim, c.kda_key_dim, c.kda_value_dim
        return (
            (first_head * key, last_head * key),
            (keys + first_head * key, keys + last_head * key),
            (2 * keys + first_head * value, 2 * keys + last_head * value),
        )

    @staticmethod
    def _on_grid(position: int) -> int:
        if position < 0 or position % TILE_TOKENS:
            raise ValueError(f"checkpoint position {position} is not on the grid of {TILE_TOKENS} tokens")
        return position
