"""WeightSizes: how many parameters a model has, by what they are for, and what they take on a GPU. Needs no torch."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from forkpoint.model.config import ModelConfig
from forkpoint.model.inventory import PACKED_SUFFIX, SCALE_SUFFIX, expected_tensors, kept_dtype
from forkpoint.parts import ITEM_BYTES

EMBEDDING: Final = "embedding"
HEAD: Final = "head"
ROUTED: Final = "routed experts"


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """The tensors for one purpose. An MXFP4 matrix and its scales are one tensor."""

    kind: str
    tensors: int
    parameters: int
    active: int
    """Parameters that one token meets: of routed experts those of `num_experts_per_token`, of all else all."""
    device_bytes: Mapping[str, int]
    """By dtype, as a GPU's kernels keep them."""

    @property
    def nbytes(self) -> int:
        return sum(self.device_bytes.values())


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """All groups of a model's weights."""

    groups: tuple[WeightGroup, ...]

    @property
    def tensors(self) -> int:
        return sum(group.tensors for group in self.groups)

    @property
    def parameters(self) -> int:
        return sum(group.parameters for group in self.groups)

    @property
    def active(self) -> int:
        return sum(group.active for group in self.groups)

    @property
    def active_without_embedding(self) -> int:
        """A token meets one row of the embedding, so published figures often leave it out."""
        return sum(group.active for group in self.groups if group.kind != EMBEDDING)

    @property
    def device_bytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    @property
    def device_bytes_by_dtype(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for group in self.groups:
            total.update(group.device_bytes)
        return dict(total)


def weight_sizes(
    config: ModelConfig, packed: bool, kept_as: Callable[[str, Sequence[int]], str] = kept_dtype
) -> WeightSizes:
    """Sizes of a config's weights; `packed`: its routed experts are MXFP4; `kept_as`: dtype by name and shape."""
    tensors: Counter[str] = Counter()
    parameters: Counter[str] = Counter()
    kept: dict[str, Counter[str]] = {}
    of_one_expert: dict[str, _Counted] = {}
    for name, shape in expected_tensors(config, packed).items():
        # K3 has half a million tensors in experts, and all of its experts are alike.
        _, of_expert, rest = name.partition(".experts.")
        matrix = rest.partition(".")[2]
        counted = of_one_expert.get(matrix) or _counted(config, name, shape, kept_as)
        if of_expert:
            of_one_expert[matrix] = counted
        tensors[counted.kind] += counted.tensors
        parameters[counted.kind] += counted.parameters
        kept.setdefault(counted.kind, Counter())[counted.dtype] += counted.nbytes
    return WeightSizes(
        tuple(
            WeightGroup(
                kind,
                tensors[kind],
                parameters[kind],
                _active(config, kind, parameters[kind]),
                {dtype: count for dtype, count in sorted(kept[kind].items()) if count},
            )
            for kind in kept
        )
    )


class _Counted(NamedTuple):
    """What one stored tensor adds to its group."""

    kind: str
    tensors: int
    parameters: int
    dtype: str
    nbytes: int


def _counted(
    config: ModelConfig, name: str, shape: tuple[int, ...], kept_as: Callable[[str, Sequence[int]], str]
) -> _Counted:
    count, dtype = math.prod(shape), kept_as(name, shape)
    # Of Attention Residuals only the product of norm and projection is kept, a vector.
    nbytes = 0 if name.endswith("_res_proj.weight") else count * ITEM_BYTES[dtype]
    own = 0 if name.endswith(SCALE_SUFFIX) else 1
    return _Counted(_kind(config, name), own, own * count * (2 if name.endswith(PACKED_SUFFIX) else 1), dtype, nbytes)


def _active(config: ModelConfig, kind: str, parameters: int) -> int:
    if kind != ROUTED or config.moe is None:
        return parameters
    return parameters // config.moe.experts * config.moe.per_token


def _kind(config: ModelConfig, name: str) -> str:
    """What a tensor is for."""
    if ".self_attn." in name:
        layer = int(name.removeprefix("model.layers.").split(".")[0])
        return f"{config.layer_kinds[layer].upper()} layers"
    for part, kind in (
        (".block_sparse_moe.experts.", ROUTED),
        (".shared_experts.", "shared experts"),
        (".routed_expert_", "latent projections"),
        (".block_sparse_moe.gate.", "routers"),
        (".mlp.", "dense feed-forward"),
        ("_res_", "Attention Residuals"),
        ("embed_tokens", EMBEDDING),
        ("lm_head", HEAD),
    ):
        if part in name:
            return kind
    return "norms"
