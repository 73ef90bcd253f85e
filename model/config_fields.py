"""ConfigFields: typed reads of a JSON config, whose errors name the field and the file."""

import math
from collections.abc import Mapping
from typing import Any, Self

from forkpoint.errors import ConfigError


class ModelConfigError(ConfigError):
    """A model's config has a field that is missing, malformed, or beyond what this version runs."""


class ConfigFields:
    """Typed reads of a JSON object; every error names the field and the file."""

    def __init__(self, raw: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.raw, self.source, self.prefix = raw, source, prefix

    def error(self, key: str, problem: str) -> ModelConfigError:
        return ModelConfigError(self.prefix + key, self.source, problem)

    def inside(self, key: str) -> Self:
        """The fields of the object `key`."""
        value = self.raw.get(key)
        if not isinstance(value, dict):
            raise self.error(key, "is missing" if value is None else "is not an object")
        return type(self)(value, self.source, f"{self.prefix}{key}.")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, f"{value!r} is not a positive integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.raw.get(key) is None else self.integer(key)

    def count(self, key: str, default: int) -> int:
        """As `integer`, or 0."""
        value = self.raw.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value == 0:
            return 0
        return self.integer(key, default)

    def number(self, key: str, default: float) -> float:
        value = self.optional_number(key)
        return default if value is None else value

    def optional_number(self, key: str) -> float | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, f"{value!r} is not a number")
        return float(value)

    def positive(self, key: str, default: float) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.error(key, f"{value!r} is not positive")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"{value!r} is not true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, or a list of at least one; each once."""
        value = self.raw.get(key)
        ids: list[Any] = value if isinstance(value, list) and value else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise self.error(key, f"{token_id!r} is not a token id")
        return tuple(dict.fromkeys(ids))

    def layer_list(self, key: str) -> list[int]:
        value = self.raw.get(key)
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) for item in value
        ):
            raise self.error(key, "is not a list of layer numbers")
        return value
