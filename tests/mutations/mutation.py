"""A mistake to be found: one change of a source file, and the test that must fail under it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`file` is relative to src/forkpoint (or, of the simulated store, to the repository), and holds `old` once.

    `test`: arguments for pytest that pick the test by which it is caught. `fast`: tried in every run of the suite.
    """

    name: str
    mistake: str
    file: str
    old: str
    new: str
    test: tuple[str, ...]
    fast: bool = False

    @property
    def module(self) -> str:
        """What the file is imported as."""
        dotted = self.file.removesuffix(".py").replace("/", ".")
        return dotted if self.file.startswith("tests/") else f"forkpoint.{dotted}"

    @property
    def path(self) -> str:
        """The file in the repository."""
        return self.file if self.file.startswith("tests/") else f"src/forkpoint/{self.file}"
