"""The published form of a model folder: names, shapes and dtypes of its tensors in the files, and its shards."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forkpoint.model.config import ModelConfig
from forkpoint.model.inventory import QUANTISED_SUFFIXES, expected_tensors
from forkpoint.parts import ITEM_BYTES

TEXT_PREFIX: Final = "language_model."
"""Before every tensor of a model whose config nests a `text_config`: K3."""
HEADS_PADDED: Final = 128
"""K3 pads `A_log` with zeros to a multiple of this."""
WIDE_SUFFIXES: Final = (".A_log", ".dt_bias", ".e_score_correction_bias")
"""fp32 in both models' files."""
WIDE_SUFFIXES_WRAPPED: Final = ("_conv1d.weight", ".o_norm.weight")
"""fp32 in K3's besides."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: its `name` and `shape` there, and `read_name` and `read_shape` in `expected_tensors`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As PartSpec spells it."""
    read_name: str
    read_shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def is_wrapped(config: ModelConfig) -> bool:
    """Whether the config has K3's form: the text model nested in a multimodal one."""
    return "text_config" in config.raw


def is_packed(config: ModelConfig) -> bool:
    """Whether the config says that routed experts are quantised. What a folder has decides for those who read it."""
    return (config.raw["text_config"] if is_wrapped(config) else config.raw).get("quantization_config") is not None


def stored_tensors(config: ModelConfig, dtype: str = "bfloat16") -> tuple[StoredTensor, ...]:
    """Every tensor of the model as its files hold it, matrices in `dtype`, in the order of the layers."""
    wrapped = is_wrapped(config)
    prefix = TEXT_PREFIX if wrapped else ""
    return tuple(
        StoredTensor(
            prefix + name, _stored_shape(name, shape, wrapped), _stored_dtype(name, dtype, wrapped), name, shape
        )
        for name, shape in expected_tensors(config, is_packed(config)).items()
    )


def _stored_dtype(name: str, dtype: str, wrapped: bool) -> str:
    if name.endswith(QUANTISED_SUFFIXES):
        return "uint8"
    wide = name.endswith(WIDE_SUFFIXES) or (wrapped and name.endswith(WIDE_SUFFIXES_WRAPPED))
    return "float32" if wide else dtype


def _stored_shape(name: str, shape: tuple[int, ...], wrapped: bool) -> tuple[int, ...]:
    if name.endswith(".A_log"):
        return (-(-shape[0] // HEADS_PADDED) * HEADS_PADDED,) if wrapped else (1, 1, shape[0], 1)
    if name.endswith("_conv1d.weight"):
        return (shape[0], 1, shape[1])
    return shape


def in_shards(tensors: Sequence[StoredTensor], shard_bytes: int) -> dict[str, tuple[StoredTensor, ...]]:
    """File names to the tensors of each: as many in a row as fit `shard_bytes`, at least one."""
    groups: list[list[StoredTensor]] = [[]]
    room = shard_bytes
    for tensor in tensors:
        if groups[-1] and tensor.nbytes > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(tensor)
        room -= tensor.nbytes
    count = len(groups)
    return {f"model-{n:05d}-of-{count:05d}.safetensors": tuple(group) for n, group in enumerate(groups, 1)}
