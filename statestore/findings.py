"""What `check` finds."""

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """ERROR: something acknowledged is lost, damaged or contradictory. WARNING: wasted space, healed by itself."""

    ERROR = "ERROR"
    WARNING = "WARNING"


@dataclass(frozen=True, slots=True)
class Finding:
    """One inconsistency: its kind (a fixed word), the resource it concerns, and what is wrong there."""

    severity: Severity
    kind: str
    where: str
    detail: str
