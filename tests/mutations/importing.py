"""Imports one module with a change in its source; the file stays as it is."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from forkpoint.statestore.redis import lualib
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]


def mutated(mutation: Mutation) -> str:
    """The file's text with the change. ValueError when the text to change is not there exactly once."""
    text = (ROOT / mutation.path).read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.name}: {mutation.path} holds the text to change {text.count(mutation.old)} times")
    changed = text.replace(mutation.old, mutation.new)
    if mutation.path.endswith(".py"):
        compile(changed, mutation.path, "exec")
    return changed


class MutatingFinder(MetaPathFinder):
    """Goes before all other finders, for one module."""

    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mutation.module:
            return None
        place = str(ROOT / self._mutation.path)
        return spec_from_file_location(fullname, place, loader=MutatingLoader(fullname, place, self._mutation))


class MutatingLoader(SourceFileLoader):
    """Compiles the changed text, past any cached bytecode."""

    def __init__(self, fullname: str, path: str, mutation: Mutation) -> None:
        super().__init__(fullname, path)
        self._mutation = mutation

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = compile(mutated(self._mutation), self.path, "exec", dont_inherit=True)
        return code


def install(mutation: Mutation) -> None:
    """From now on the module is imported with the change, and must not have been imported yet; a file in Lua is read
    with the change."""
    if mutation.path.endswith(".lua"):
        read, changed = lualib.read_file, Path(mutation.path).stem
        lualib.read_file = lambda name: mutated(mutation) if name == changed else read(name)
        return
    assert mutation.module not in sys.modules, f"{mutation.module} is imported already"
    sys.meta_path.insert(0, MutatingFinder(mutation))
