"""What a run is to be, and what it came to."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.chaos.nemesis import MOVES, SLOW, STORE_LANE, SUDDEN, Lane, killers


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run is to be."""

    seed: int
    seconds: float
    """New sessions and new evils come for so long."""
    kills: int = 0
    """Also go on until so many nodes were killed."""
    nodes: int = 3
    sessions: int = 50
    """At once; each that ends is followed by a new one."""
    tokens: int = 60
    """The longest stream."""
    catalog: str = "redis"
    engine: str = "hash"
    step_pause_ms: float = 20.0
    slots: int = 24
    apart: bool = True
    """Whether machines are apart, where that can be (network.py)."""
    far: bool = True
    """Whether the last node is as on another host: only its lease tells whether it lives."""
    gated: bool = False
    """Whether nodes can be made to wait at the steps of a move."""
    evils: str = "all"
    """`all`, or `kills`: nothing but the killers'."""
    between: int = 50
    """Tokens that clients get between two kills."""
    killers: int = 1
    """Sequences of kills beside each other."""

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What goes wrong."""
        return (*killers(self.killers), *(() if self.evils == "kills" else (SUDDEN, SLOW, STORE_LANE, MOVES)))


@dataclass
class Verdict:
    """What a run came to. Sound when all lists are empty."""

    lost: list[str] = field(default_factory=list)
    divergent: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    """Servers that ended by themselves, leaked, or said something unexpected."""
    counts: dict[str, int] = field(default_factory=dict)
    deeds: dict[str, int] = field(default_factory=dict)
    moves: dict[str, int] = field(default_factory=dict)
    """What moves and drains came to."""
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether every promise was kept."""
        return not (self.lost or self.divergent or self.stale or self.findings or self.nodes)

    def line(self, settings: Settings) -> str:
        """The summary."""
        return json.dumps({"chaos": asdict(settings), "sound": self.sound, **asdict(self)})


def spoken(log: Path) -> Counter[str]:
    """What a server's log calls an error: exceptions that nobody expected, and how often."""
    found = Counter[str]()
    for line in log.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            if line.startswith("Traceback"):
                found["a traceback outside the log"] += 1
            continue
        if "frames" in record:
            place = record["frames"][-1].rpartition("/")[2] if record["frames"] else ""
            found[f"{record['logger']}: {record.get('error')} at {place}"] += 1
    return found


def unexpected(logs: Sequence[Path]) -> list[str]:
    """Of all logs, most frequent first."""
    total = sum((spoken(log) for log in logs), Counter[str]())
    return [f"{count} times {what}" for what, count in total.most_common()]
