"""`tokenizer_config.json`: the kind of tokenizer that a folder has, and its tokens beyond the vocabulary of text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from forkpoint.model.config_fields import ModelConfigError

CONFIG_FILE: Final = "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that no text is encoded to. One that is not `special` shows in decoded text, spelled as `content`."""

    content: str
    special: bool


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """What is read of a folder's `tokenizer_config.json`."""

    source: str
    tokenizer_class: object
    """As the file has it: a name, when all is well."""
    raw: Mapping[str, Any]

    @classmethod
    def from_folder(cls, folder: Path | str) -> Self:
        """Raises ModelConfigError when there is no such file, or no JSON object in it."""
        path = Path(folder) / CONFIG_FILE
        try:
            raw: Any = json.loads(path.read_bytes())
        except OSError as error:
            raise ModelConfigError(CONFIG_FILE, str(folder), error.strerror or str(error)) from error
        except ValueError as error:
            raise ModelConfigError(CONFIG_FILE, str(folder), f"is not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ModelConfigError(CONFIG_FILE, str(folder), "is not a JSON object")
        return cls(str(path), raw.get("tokenizer_class"), raw)

    def added_tokens(self) -> dict[int, AddedToken]:
        """`added_tokens_decoder` by id, ascending. Raises ModelConfigError; no two tokens are spelled alike."""
        try:
            entries = self.raw["added_tokens_decoder"].items()
            tokens = {
                int(token_id): AddedToken(str(entry["content"]), entry.get("special", True) is not False)
                for token_id, entry in entries
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self.error("does not map ids to contents") from error
        if len({token.content for token in tokens.values()}) != len(tokens):
            raise self.error("names two ids alike")
        return dict(sorted(tokens.items()))

    def error(self, problem: str) -> ModelConfigError:
        """What is wrong with `added_tokens_decoder`."""
        return ModelConfigError("added_tokens_decoder", self.source, problem)
