"""check_folder: what is wrong with a model folder, from its config and the headers of its files."""

from dataclasses import dataclass, field
from pathlib import Path

from forkpoint.errors import ConfigError
from forkpoint.model.checkpoint import Checkpoint
from forkpoint.model.config import ModelConfig
from forkpoint.model.inventory import PACKED_SUFFIX
from forkpoint.model.stops import stop_ids
from forkpoint.model.tensors import WeightsError
from forkpoint.model.tokenizer import load_tokenizer
from forkpoint.model.weights import check_weights


@dataclass(slots=True)
class FolderCheck:
    """What was found. `packed`: the folder's experts are MXFP4."""

    packed: bool = False
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_folder(folder: Path | str, config: ModelConfig) -> FolderCheck:
    """Every problem that stands between a folder and being served, none of which hides another. Reads no weights."""
    found = FolderCheck()
    found.problems += [
        f"{lacking.field}: {lacking.what} is not supported by this version" for lacking in config.unsupported
    ]
    try:
        tensors = Checkpoint(folder)
        found.packed = any(name.endswith(PACKED_SUFFIX) for name in tensors)
        found.notes += check_weights(config, tensors, str(folder)).notes
    except WeightsError as error:
        found.problems += error.problems
    try:
        tokenizer = load_tokenizer(folder)
        if tokenizer.vocab_size > config.vocab_size:
            ids = f"{config.vocab_size} is less than the tokenizer's {tokenizer.vocab_size}"
            found.problems.append(f"vocab_size: {ids}")
        stop_ids(config, folder)
    except ConfigError as error:
        found.problems.append(str(error))
    return found
