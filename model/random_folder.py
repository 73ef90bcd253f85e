"""RandomFolder: a model folder in the published format whose weights nobody trained, for tests and benchmarks."""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.model.checkpoint import INDEX_FILE
from forkpoint.model.config import ModelConfig
from forkpoint.model.geometry_sizes import BYTE_VALUES, CONTROL_NAMES
from forkpoint.model.published import StoredTensor, in_shards, stored_tensors
from forkpoint.model.random_weights import random_tensor
from forkpoint.model.state import TORCH_DTYPES

SHARD_BYTES: Final = 4 << 30
"""At most this of a folder is in memory; the largest single tensor of K3 takes 2.3 GB."""
OTHER_BYTES: Final = 128 << 20
"""Room on the disk for headers and for the index of half a million names."""
HEAD: Final = "lm_head.weight"


class RandomFolder:
    """What will be in the folder: `raw` is its config.json, with ids of a byte tokenizer; matrices are in `dtype`.

    `never_stop`: greedy streams never end by themselves: logits of all ids but bytes are 0, which is never the largest.
    Equal arguments give equal files, on one version of torch and one kind of CPU. Raises ModelConfigError.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        seed: int = 0,
        dtype: str = "bfloat16",
        never_stop: bool = False,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.raw, self.seed, self.never_stop = raw, seed, never_stop
        self.config = ModelConfig.from_dict(raw)
        self.tensors = stored_tensors(self.config, dtype)
        self.shards = in_shards(self.tensors, shard_bytes)

    @cached_property
    def weight_bytes(self) -> int:
        """Of all tensors, in the files."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def require_room(self, folder: Path) -> None:
        """Raise ConfigError unless `folder` is new or empty and its disk has room for everything."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError("DIR", "command line", f"{str(folder)!r} exists and is not an empty folder")
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        needed, free = self.weight_bytes + OTHER_BYTES, shutil.disk_usage(existing).free
        if needed > free:
            problem = f"{needed:,} bytes are needed and {free:,} are free on the disk of {str(existing)!r}"
            raise ConfigError("DIR", "command line", problem)

    def write(self, folder: Path, written: Callable[[int], object] = lambda _: None) -> None:
        """Write all files, one shard after the other; `written` is told the bytes of each when it is on its way to the
        disk. An interrupted folder has no config.json and loads nowhere."""
        self.require_room(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weight_map = {tensor.name: file for file, tensors in self.shards.items() for tensor in tensors}
        index = folder / INDEX_FILE
        _write_json(index, {"metadata": {"total_size": self.weight_bytes}, "weight_map": weight_map})
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for file, tensors in self.shards.items():
                made = pool.map(self._make, tensors)
                save_file({t.name: tensor for t, tensor in zip(tensors, made, strict=True)}, folder / file)
                # safetensors lets nobody else read its files; who may read the index may read these.
                (folder / file).chmod(index.stat().st_mode)
                written(sum(tensor.nbytes for tensor in tensors))
        _write_json(folder / "tokenizer_config.json", _byte_tokenizer(self.config.vocab_size))
        _write_json(folder / "generation_config.json", self._generation())
        _write_json(folder / "config.json", self.raw)

    def _make(self, stored: StoredTensor) -> Tensor:
        tensor = random_tensor(stored.read_name, stored.read_shape, self.seed, TORCH_DTYPES[stored.dtype])
        if self.never_stop and stored.read_name == HEAD:
            tensor[BYTE_VALUES:] = 0
        if padding := math.prod(stored.shape) - tensor.numel():
            tensor = torch.cat([tensor, tensor.new_zeros(padding)])
        return tensor.view(stored.shape)

    def _generation(self) -> dict[str, Any]:
        text = self.raw.get("text_config", self.raw)
        return {name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")} | {"do_sample": False}


def _byte_tokenizer(vocab_size: int) -> dict[str, Any]:
    """tokenizer_config.json: bytes, control tokens, and a name for the last id, so that each id is one of its own."""
    names = {BYTE_VALUES + index: name for index, name in enumerate(CONTROL_NAMES)}
    names.setdefault(vocab_size - 1, f"<|reserved_{vocab_size - 1}|>")
    entries = {str(token_id): {"content": name, "special": True} for token_id, name in names.items()}
    return {"tokenizer_class": "ByteTokenizer", "added_tokens_decoder": entries}


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
