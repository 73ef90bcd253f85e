"""check_folder: what is wrong with a model folder, from its config and the headers of its files."""

from dataclasses import dataclass, field
from pathlib import Path

from forkpoint.model.checkpoint import Checkpoint
from forkpoint.model.config import ModelConfig
from forkpoint.model.inventory import PACKED_SUFFIX
from forkpoint.model.weights import WeightsError, check_weights


@dataclass(slots=True)
class FolderCheck:
    """What was found. `packed`: the folder's experts are MXFP4."""

    packed: bool = False
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_folder(folder: Path | str, config: ModelConfig) -> FolderCheck:
    """Every problem of a folder's tensors, none of which stops the others from being told."""
    found = FolderCheck()
    try:
        tensors = Checkpoint(folder)
        found.packed = any(name.endswith(PACKED_SUFFIX) for name in tensors)
        found.notes += check_weights(config, tensors, str(folder)).notes
    except WeightsError as error:
        found.problems += error.problems
    return found
