"""What `check` finds."""

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """ERROR: something acknowledged is lost, damaged or contradictory. WARNING: wasted space, or something that is
    healed by itself or by the next use."""

    ERROR = "ERROR"
    WARNING = "WARNING"


@dataclass(frozen=True, slots=True)
class Finding:
    """One inconsistency: its kind (a fixed word), the resource it concerns, and what is wrong there."""

    severity: Severity
    kind: str
    where: str
    detail: str
    subject: tuple[str, ...] = ()
    """For repair: names of what is concerned, as the kind needs them."""
