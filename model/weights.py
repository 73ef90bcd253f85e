"""Weights: every stored tensor accounted for before one is read, and each read in the shape that the layers take.

Dtype rules: weights may be stored in bf16, fp16 or fp32, quantised ones in bytes. `A_log`, `dt_bias` and
`e_score_correction_bias` are read as fp32 however they are stored. `A_log` is one scalar a head and may be stored
`[1, 1, H, 1]` or padded with zeros (K3: 128 for 96 heads); conv weights `[C, 1, 4]` or `[C, 4]`.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from forkpoint.model.config import ModelConfig
from forkpoint.model.inventory import PACKED_SUFFIX, QUANTISED_SUFFIXES, expected_tensors
from forkpoint.model.published import TEXT_PREFIX, WIDE_SUFFIXES
from forkpoint.model.shard import TensorSpec
from forkpoint.model.tensors import TensorSource, WeightsError, as_source

__all__ = ["CheckedWeights", "WeightsError", "check_weights", "is_skipped"]

SKIPPED_PREFIXES: Final = ("vision_tower.", "mm_projector.")
"""What sees, in a multimodal checkpoint: it is not read."""
WEIGHT_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_LEGACY_MIX: Final = re.compile(r"\b(self_attention_res|mlp_res|output_attn_res)\.(proj|norm)_weight$")
"""How early copies of K3 name the weights of Attention Residuals."""


class CheckedWeights(TensorSource):
    """A model's tensors under their published names in canonical shapes; each is read when it is asked for. `notes`
    say what was left out."""

    def __init__(
        self, stored: TensorSource, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], source: str
    ) -> None:
        self._stored, self._names, self._shapes, self._source = stored, names, shapes, source
        skipped = sum(is_skipped(name) for name in stored)
        self.notes = [f"{skipped} vision tensors are skipped, this version reads text"] if skipped else []

    def spec(self, name: str) -> TensorSpec:
        dtype = self._stored.spec(self._names[name]).dtype
        return TensorSpec(torch.float32 if name.endswith(WIDE_SUFFIXES) else dtype, self._shapes[name])

    def __getitem__(self, name: str) -> Tensor:
        tensor, shape = self._stored[self._names[name]], self._shapes[name]
        if name.endswith(".A_log"):
            heads, flat = shape[0], tensor.reshape(-1)
            if flat[heads:].any():
                raise WeightsError(self._source, [f"{name} has values beyond its {heads} heads, not padding"])
            tensor = flat[:heads]
        if name.endswith(WIDE_SUFFIXES):
            tensor = tensor.float()
        return tensor.reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def is_skipped(stored_name: str) -> bool:
    """Whether a stored tensor is no part of the text model."""
    return stored_name.startswith(SKIPPED_PREFIXES)


def published_name(stored_name: str) -> str:
    """The name that the layers ask for: without the wrapper's prefix, in today's spelling."""
    name = stored_name.removeprefix(TEXT_PREFIX)
    if name != stored_name and name.startswith("layers."):
        name = "model." + name
    return _LEGACY_MIX.sub(r"\1_\2.weight", name)


def check_weights(config: ModelConfig, weights: Mapping[str, Tensor], source: str = "weights") -> CheckedWeights:
    """The model's tensors, of which none is read; WeightsError reports all that does not fit the config."""
    stored = as_source(weights)
    spellings: defaultdict[str, list[str]] = defaultdict(list)
    for name in (*stored, *stored.unreadable):
        if not is_skipped(name):
            spellings[published_name(name)].append(name)
    # Whether experts are packed is said by the tensors alone.
    expected = expected_tensors(config, packed=any(name.endswith(PACKED_SUFFIX) for name in spellings))
    problems = [*stored.problems]
    problems += [f"{name} is missing" for name in sorted(expected.keys() - spellings.keys())]
    problems += [f"{name} is unexpected" for name in sorted(spellings.keys() - expected.keys())]
    for name in sorted(expected.keys() & spellings.keys()):
        if len(spellings[name]) > 1:
            problems.append(f"{name} is stored as {' and as '.join(spellings[name])}")
        elif (only := spellings[name][0]) not in stored.unreadable:
            problems += _misfits(name, stored.spec(only), expected[name])
    if problems:
        raise WeightsError(source, problems)
    return CheckedWeights(stored, {name: spellings[name][0] for name in expected}, expected, source)


def _misfits(name: str, spec: TensorSpec, shape: tuple[int, ...]) -> Iterator[str]:
    if name.endswith(QUANTISED_SUFFIXES):
        if spec.dtype != torch.uint8:
            yield f"{name} has dtype {spec.dtype}, expected bytes (torch.uint8)"
    elif spec.dtype not in WEIGHT_DTYPES:
        yield f"{name} has dtype {spec.dtype}, not a float dtype that this version reads"
    if not _fits(name, spec.shape, shape):
        yield f"{name} has shape {list(spec.shape)}, expected {list(shape)}"


def _fits(name: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a stored shape is the canonical one, or a published variant of it."""
    if name.endswith(".A_log"):
        # Of the axes only one may be other than 1. What is beyond the heads is looked at when it is read.
        return math.prod(stored) in stored and math.prod(stored) >= shape[0]
    if name.endswith("_conv1d.weight") and stored == (shape[0], 1, shape[1]):
        return True
    return stored == shape
