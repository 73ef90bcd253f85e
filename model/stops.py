"""Which ids end a generation: what the folder's `config.json` and `generation_config.json` name, together."""

import json
from pathlib import Path
from typing import Any, Final

from forkpoint.model.config import ModelConfig
from forkpoint.model.config_fields import ConfigFields, ModelConfigError

GENERATION_FILE: Final = "generation_config.json"


def stop_ids(config: ModelConfig, folder: Path | str) -> tuple[int, ...]:
    """The config's ids, then those that only `generation_config.json` has. A folder need not have that file, nor the
    file an `eos_token_id`. The tokenizer's own end-of-text token is none of them: K3's `[EOS]` is not what
    ends its turns.

    Raises ModelConfigError for a malformed file and for an id outside the vocabulary.
    """
    path = Path(folder) / GENERATION_FILE
    if not path.exists():
        return config.eos_token_ids
    try:
        raw: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelConfigError(GENERATION_FILE, str(folder), error.strerror or str(error)) from error
    except ValueError as error:
        raise ModelConfigError(GENERATION_FILE, str(folder), f"is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelConfigError(GENERATION_FILE, str(folder), "is not a JSON object")
    if raw.get("eos_token_id") is None:
        return config.eos_token_ids
    fields = ConfigFields(raw, str(path))
    ids = fields.token_ids("eos_token_id")
    if (largest := max(ids)) >= config.vocab_size:
        raise fields.error("eos_token_id", f"{largest} is outside the vocabulary")
    return tuple(dict.fromkeys((*config.eos_token_ids, *ids)))
