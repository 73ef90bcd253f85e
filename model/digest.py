"""The digest that names a model: over its config and the bytes of its tensors, made while they are loaded.

Which tensor is read first depends on the layers, and all of them may take minutes to read once. So each is hashed by
itself as it passes, and the model's digest is over the sorted list of these hashes: docs/adr/0020.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from forkpoint.model.config import ModelConfig
from forkpoint.model.shard import TensorSpec
from forkpoint.model.tensors import TensorSource, as_source
from forkpoint.model.weights import is_skipped

LoadProgress = Callable[[int, int], None]
"""Called after each tensor: bytes read, and bytes that there are to read."""
FORMAT: Final = b"forkpoint model digest 2"
"""Version 1 was BLAKE2b over all bytes in the order of the names."""
THREADED_BYTES: Final = 1 << 20
"""From here on a tensor is hashed by all cores."""


class DigestedTensors(TensorSource):
    """Passes tensors on from `source` and hashes each, so that in the end `model_digest` need not read them again."""

    def __init__(self, source: TensorSource, progress: LoadProgress | None = None) -> None:
        self._source, self._progress = source, progress
        self.problems, self.unreadable = source.problems, source.unreadable
        self._hashes: dict[str, bytes] = {}
        self._done = 0
        self.total_bytes = sum(source.spec(name).nbytes for name in source if not is_skipped(name))

    def spec(self, name: str) -> TensorSpec:
        return self._source.spec(name)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._source[name]
        if name not in self._hashes:
            self._hashes[name] = tensor_hash(tensor)
            self._done += self._source.spec(name).nbytes
            if self._progress is not None:
                self._progress(self._done, self.total_bytes)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)

    def model_digest(self, config: ModelConfig) -> bytes:
        """32 bytes. Tensors that nobody asked for are read now; those that are skipped in loading are no part of it."""
        # Here, so that kernels and models are imported without it.
        from blake3 import blake3

        digest = blake3()

        def feed(data: bytes) -> None:
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)

        feed(FORMAT)
        feed(config.canonical_json())
        for name in sorted(name for name in self._source if not is_skipped(name)):
            if name not in self._hashes:
                self[name]
            spec = self._source.spec(name)
            feed(name.encode())
            feed(str(spec.dtype).removeprefix("torch.").encode())
            feed(json.dumps(list(spec.shape)).encode())
            feed(self._hashes[name])
        return digest.digest()


def tensor_hash(tensor: Tensor) -> bytes:
    """BLAKE3 of a tensor's bytes, on a CPU, in row-major order."""
    from blake3 import blake3

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    threads = blake3.AUTO if flat.numel() >= THREADED_BYTES else 1
    return blake3(flat.numpy().data, max_threads=threads).digest()


def model_digest(config: ModelConfig, tensors: Mapping[str, Tensor]) -> bytes:
    """The digest of a model whose tensors are at hand: 32 bytes over config, names, dtypes, shapes and bytes."""
    return DigestedTensors(as_source(tensors)).model_digest(config)
