"""Weights: a Hugging Face folder's tensors, every one accounted for, and the digest that names a model.

Dtype rules: weights may be stored in bf16, fp16 or fp32; they are computed in fp32. `A_log` is one scalar a head and
may be stored `[1, 1, H, 1]` or padded with zeros (K3: 128 for 96 heads); conv weights `[C, 1, 4]` or `[C, 4]`.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.limits import DIGEST_BYTES
from forkpoint.model.config import ModelConfig
from forkpoint.model.inventory import PACKED_SUFFIX, QUANTISED_SUFFIXES, expected_tensors

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
WRAPPER_PREFIX: Final = "language_model."
"""Multimodal checkpoints (K3) carry it before every text tensor's name."""
WEIGHT_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_PROBLEMS_SHOWN: Final = 20


class WeightsError(ConfigError):
    """The tensors of a model folder do not fit its config. One error reports every problem; `problems` lists them."""

    def __init__(self, source: str, problems: list[str]) -> None:
        shown = problems[:_PROBLEMS_SHOWN]
        more = [f"and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
        super().__init__("weights", source, "; ".join(shown + more))
        self.problems = problems


def check_weights(config: ModelConfig, weights: Mapping[str, Tensor], source: str = "weights") -> dict[str, Tensor]:
    """The tensors under their published names in canonical shapes; WeightsError reports all that does not fit."""
    named = {name.removeprefix(WRAPPER_PREFIX): tensor for name, tensor in weights.items()}
    expected = expected_tensors(config, packed=any(name.endswith(PACKED_SUFFIX) for name in named))
    problems = [f"{name} is missing" for name in sorted(set(expected) - set(named))]
    problems += [f"{name} is unexpected" for name in sorted(set(named) - set(expected))]
    if len(named) != len(weights):
        problems.append(f"a name appears with and without {WRAPPER_PREFIX!r}")
    checked: dict[str, Tensor] = {}
    for name in sorted(set(expected) & set(named)):
        tensor = _canonical(name, named[name], expected[name])
        if (tensor.dtype == torch.uint8) != name.endswith(QUANTISED_SUFFIXES) or (
            tensor.dtype not in (torch.uint8, *WEIGHT_DTYPES)
        ):
            problems.append(f"{name} has dtype {tensor.dtype}, not a float dtype that this version reads")
        elif tuple(tensor.shape) != expected[name]:
            problems.append(f"{name} has shape {list(named[name].shape)}, expected {list(expected[name])}")
        checked[name] = tensor
    if problems:
        raise WeightsError(source, problems)
    return checked


def _canonical(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Undo the published variants of a tensor's shape; anything else is returned as it is, for the report."""
    if name.endswith(".A_log"):
        heads, flat = shape[0], tensor.reshape(-1)
        # Only singleton axes may be dropped, and only zeros are padding.
        if tensor.numel() in tensor.shape and flat.numel() >= heads and not flat[heads:].any():
            return flat[:heads]
    if name.endswith("_conv1d.weight") and tensor.dim() == 3 and tensor.shape[1] == 1:
        return tensor.squeeze(1)
    return tensor


def read_tensors(folder: Path | str) -> dict[str, Tensor]:
    """Every tensor of a folder's `model.safetensors`, or of the shards that its index names, as stored.

    Raises WeightsError when a file is missing or damaged, or when shards and index disagree.
    """
    folder = Path(folder)
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists():
        return _read_file(single)
    if not index.exists():
        raise WeightsError(str(folder), [f"has neither {SINGLE_FILE} nor {INDEX_FILE}"])
    weight_map = _read_index(index)
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    for shard in sorted(set(weight_map.values())):
        try:
            found = _read_file(folder / shard)
        except WeightsError as error:
            problems += error.problems
            continue
        listed = {name for name, file in weight_map.items() if file == shard}
        problems += [f"{name} is missing from {shard}" for name in sorted(listed - set(found))]
        problems += [f"{name} in {shard} is not in the index" for name in sorted(set(found) - listed)]
        tensors |= found
    if problems:
        raise WeightsError(str(folder), problems)
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map: Any = json.loads(index.read_bytes())["weight_map"]
        entries = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            str(index), ["is no index: it needs an object weight_map of tensor names to files"]
        ) from error
    if strange := sorted(file for file in set(entries.values()) if Path(file).name != file):
        raise WeightsError(str(index), [f"names a file outside its folder: {file!r}" for file in strange])
    return entries


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    except FileNotFoundError as error:
        raise WeightsError(str(path.parent), [f"{path.name} does not exist"]) from error
    except (SafetensorError, OSError) as error:
        raise WeightsError(str(path.parent), [f"{path.name} can't be read: {error}"]) from error


def model_digest(config: ModelConfig, tensors: Mapping[str, Tensor]) -> bytes:
    """32-byte BLAKE2b over the parsed config and every tensor as stored: name, dtype, shape, bytes, sorted by name.

    Every field is length-prefixed, so that no two models give the same input.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def feed(data: bytes | memoryview) -> None:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    feed(json.dumps(config.raw, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        feed(name.encode())
        feed(str(tensor.dtype).removeprefix("torch.").encode())
        feed(json.dumps(list(tensor.shape)).encode())
        feed(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
