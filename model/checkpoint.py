"""Checkpoint: the tensors of a Hugging Face folder, known from their headers, each read when it is asked for."""

import json
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from forkpoint.model.shard import Shard, ShardError, TensorSpec
from forkpoint.model.tensors import TensorSource, WeightsError

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"


class Checkpoint(TensorSource):
    """`model.safetensors`, or the shards that `model.safetensors.index.json` names. No tensor is read, and no file kept
    open, between calls; what is wrong with files is in `problems`, for one report with what is wrong with tensors.

    Raises WeightsError for a folder that has neither, an index that is none, or a single file that can't be read.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        self.source = str(folder)
        if (folder / SINGLE_FILE).exists():
            self._open_single(folder / SINGLE_FILE)
        else:
            self._open_shards(folder, _read_index(folder))

    def _open_single(self, path: Path) -> None:
        try:
            shard = Shard.open(path)
        except ShardError as error:
            raise WeightsError(self.source, [str(error)]) from error
        self._shards = dict.fromkeys(shard.entries, shard)
        self.problems, self.unreadable = shard.problems, shard.unreadable

    def _open_shards(self, folder: Path, listed: Mapping[str, str]) -> None:
        shards: dict[str, Shard] = {}
        problems: list[str] = []
        for file in sorted(set(listed.values())):
            try:
                shards[file] = Shard.open(folder / file)
            except ShardError as error:
                problems.append(str(error))
        found: defaultdict[str, list[str]] = defaultdict(list)
        for file, shard in shards.items():
            problems += shard.problems
            for name in (*shard.entries, *shard.unreadable):
                found[name].append(file)
        problems += _disagreements(listed, found, shards)
        self._shards = {name: shard for shard in shards.values() for name in shard.entries}
        self.problems, self.unreadable = problems, frozenset((listed.keys() | found.keys()) - self._shards.keys())

    def spec(self, name: str) -> TensorSpec:
        return self._shards[name].entries[name].spec

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._shards[name].read(name)
        except ShardError as error:
            raise WeightsError(self.source, [str(error)]) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


def _disagreements(
    listed: Mapping[str, str], found: Mapping[str, list[str]], readable: Container[str]
) -> Iterator[str]:
    """What an index says of readable files that is not so; `found` are the files that have a tensor."""
    for name in sorted(listed.keys() | found.keys()):
        files, file = found.get(name, []), listed.get(name)
        if len(files) > 1:
            yield f"{name} is in {' and in '.join(files)}"
        elif file is None:
            yield f"{name} in {files[0]} is not in the index"
        elif not files and file in readable:
            yield f"{name} is missing from {file}"
        elif files and files != [file]:
            yield f"{name} is in {files[0]}, the index says {file}"


def _read_index(folder: Path) -> dict[str, str]:
    """Tensors and the files that have them. Raises WeightsError."""
    index = folder / INDEX_FILE
    if not index.exists():
        raise WeightsError(str(folder), [f"has neither {SINGLE_FILE} nor {INDEX_FILE}"])
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
