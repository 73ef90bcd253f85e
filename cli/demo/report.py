"""What the demo tells at its end: the steps, the answers, and whether both sides are equal."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from rich.table import Table
from rich.text import Text

from forkpoint.cli.output import bytes_text, console


@dataclass(frozen=True)
class Step:
    """One thing that the demo did. Tokens and bytes are None where the step has none."""

    what: str
    seconds: float
    side: str = ""
    """"interrupted" or "undisturbed"."""
    generated: int | None = None
    restored: int | None = None
    """Tokens whose state came from a checkpoint."""
    replayed: int | None = None
    """Tokens that were consumed again from the log."""
    stored: int | None = None
    """Raw bytes of checkpoint parts that were new to the store."""
    shared: int | None = None
    """Raw bytes of checkpoint parts that the store held already."""


@dataclass(frozen=True)
class Answer:
    """What a session said to a question whose answer was planted in the document."""

    session: str
    question: str
    said: str
    planted: str

    @property
    def right(self) -> bool:
        return self.said == self.planted


@dataclass(frozen=True)
class SessionResult:
    """A session at the end of one side: its tokens, and the digest of every part of its state."""

    token_ids: tuple[int, ...]
    parts: Mapping[str, str]


@dataclass(frozen=True)
class Comparison:
    """One session of both sides. Differences are counted; -1 as a position says that there is none."""

    session: str
    tokens: int
    first_other_token: int
    parts: int
    other_parts: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return self.first_other_token < 0 and not self.other_parts


def compare(session: str, ours: SessionResult, undisturbed: SessionResult) -> Comparison:
    """Compare a session that went through everything with the one that was never interrupted."""
    a, b = ours.token_ids, undisturbed.token_ids
    shorter = min(len(a), len(b))
    differing = next((i for i in range(shorter) if a[i] != b[i]), -1 if len(a) == len(b) else shorter)
    names = sorted(ours.parts.keys() | undisturbed.parts.keys())
    other = tuple(name for name in names if ours.parts.get(name) != undisturbed.parts.get(name))
    return Comparison(session, len(a), differing, len(names), other)


@dataclass
class Report:
    """Everything that the demo found out."""

    steps: list[Step] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    sabotage: str = ""
    store: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the interrupted side's store."""

    @property
    def equal(self) -> bool:
        return bool(self.comparisons) and all(comparison.equal for comparison in self.comparisons)

    @property
    def generated(self) -> int:
        """Tokens that both sides generated."""
        return sum(step.generated or 0 for step in self.steps)

    def as_dict(self) -> dict[str, object]:
        """For --json."""
        return {
            "equal": self.equal,
            "sabotage": self.sabotage or None,
            "generated_tokens": self.generated,
            "seconds": round(sum(step.seconds for step in self.steps), 3),
            "store": dict(self.store),
            "steps": [asdict(step) for step in self.steps],
            "answers": [asdict(answer) | {"right": answer.right} for answer in self.answers],
            "comparisons": [asdict(comparison) | {"equal": comparison.equal} for comparison in self.comparisons],
        }

    def print(self) -> None:
        """Three tables and a verdict."""
        out = console()
        out.print(_steps_table(self.steps, self.generated))
        if self.store:
            out.print(
                f"The interrupted side's store: {self.store['checkpoints']} checkpoints, "
                f"{bytes_text(self.store['distinct'])} of state parts ({bytes_text(self.store['on_disk'])} on disk), "
                f"{bytes_text(self.store['shared'])} more saved by sharing"
            )
        out.print(_answers_table(self.answers))
        out.print(_comparison_table(self.comparisons))
        out.print(Text(self.verdict(), style="bold green" if self.equal else "bold red"))

    def verdict(self) -> str:
        """One sentence."""
        right = sum(answer.right for answer in self.answers)
        recalled = f"{right} of {len(self.answers)} planted facts recalled."
        if self.equal:
            tokens = sum(comparison.tokens for comparison in self.comparisons)
            parts = sum(comparison.parts for comparison in self.comparisons)
            return (
                f"EQUAL: {len(self.comparisons)} sessions, {tokens:,} token ids and {parts} state parts are the same "
                f"as without a kill, a move or a restore. {recalled}"
            )
        unequal = ", ".join(comparison.session for comparison in self.comparisons if not comparison.equal)
        cause = f" (sabotage: {self.sabotage})" if self.sabotage else ""
        return f"UNEQUAL: {unequal} differ from the undisturbed run{cause}. {recalled}"


def _steps_table(steps: Sequence[Step], generated: int) -> Table:
    table = Table(title="What was done", title_justify="left")
    table.add_column("step")
    for name in ("seconds", "generated", "restored", "replayed", "stored", "shared"):
        table.add_column(name, justify="right")
    side = ""
    for step in steps:
        if step.side != side:
            side = step.side
            table.add_section()
            table.add_row(Text(f"the {side} side", style="bold"))
        counts = (step.generated, step.restored, step.replayed)
        sizes = (step.stored, step.shared)
        table.add_row(
            Text(step.what),
            f"{step.seconds:.2f}",
            *("" if count is None else f"{count:,}" for count in counts),
            *("" if size is None else bytes_text(size) for size in sizes),
        )
    table.add_section()
    table.add_row("all", f"{sum(step.seconds for step in steps):.2f}", f"{generated:,}", "", "", "", "")
    return table


def _answers_table(answers: Sequence[Answer]) -> Table:
    table = Table(title="What the sessions remembered", title_justify="left")
    for name in ("session", "question", "said", "planted", ""):
        table.add_column(name)
    for answer in answers:
        mark = Text("right", style="green") if answer.right else Text("wrong", style="red")
        table.add_row(Text(answer.session), Text(answer.question), Text(answer.said), Text(answer.planted), mark)
    return table


def _comparison_table(comparisons: Sequence[Comparison]) -> Table:
    table = Table(title="Compared with the undisturbed run", title_justify="left")
    for name, justify in (("session", "left"), ("tokens", "right"), ("token ids", "left"), ("state parts", "left")):
        table.add_column(name, justify="right" if justify == "right" else "left")
    for comparison in comparisons:
        first = comparison.first_other_token
        tokens = "equal" if first < 0 else f"differ from position {first:,}"
        other = len(comparison.other_parts)
        parts = f"all {comparison.parts} equal" if not other else f"{other} of {comparison.parts} differ"
        style = "green" if comparison.equal else "red"
        table.add_row(
            Text(comparison.session), f"{comparison.tokens:,}", Text(tokens, style=style), Text(parts, style=style)
        )
    return table
