"""Identifiers: resource ids and names as the API spells them.

A workflow is `workflows/{w}`, a session `workflows/{w}/sessions/{s}`, a checkpoint
`workflows/{w}/sessions/{s}/checkpoints/{c}`, a node `nodes/{n}`. Ids follow AIP-122: lower-case letters, digits and
hyphens, 1 to 63 characters, beginning with a letter or digit.
"""

import re
import secrets
from dataclasses import dataclass
from typing import Final, Self

from forkpoint.errors import InvalidFieldError

ID_PATTERN: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\Z")
_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789"


def check_id(value: str, field: str) -> str:
    """Return `value` if it is a well-formed id, else raise InvalidFieldError naming `field`."""
    if not ID_PATTERN.match(value):
        raise InvalidFieldError(field, f"{value!r} is no id: use 1 to 63 of a-z, 0-9 and '-', not '-' at either end")
    return value


def new_id(prefix: str) -> str:
    """A fresh random id such as `s-4k2j9x8w1q0z`; 62 bits, so that nodes need not agree on a counter."""
    return f"{prefix}-" + "".join(secrets.choice(_ALPHABET) for _ in range(12))


@dataclass(frozen=True, slots=True, order=True)
class SessionName:
    """`workflows/{workflow}/sessions/{session}`."""

    workflow: str
    session: str

    @classmethod
    def parse(cls, text: str, field: str = "name") -> Self:
        """Parse a resource name; raises InvalidFieldError."""
        parts = text.split("/")
        if len(parts) != 4 or parts[0] != "workflows" or parts[2] != "sessions":
            raise InvalidFieldError(field, f"{text!r} is no session name: expected workflows/W/sessions/S")
        return cls(check_id(parts[1], field), check_id(parts[3], field))

    def __str__(self) -> str:
        return f"workflows/{self.workflow}/sessions/{self.session}"


def parse_workflow(text: str, field: str = "name") -> str:
    """The id in `workflows/{w}`; raises InvalidFieldError."""
    parts = text.split("/")
    if len(parts) != 2 or parts[0] != "workflows":
        raise InvalidFieldError(field, f"{text!r} is no workflow name: expected workflows/W")
    return check_id(parts[1], field)
