"""Reads Python sources and says which of the project's rules they break; tests/test_architecture.py holds the data."""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUB = re.compile(r"_pb2(_grpc)?\.pyi?$")


@dataclass(frozen=True)
class Room:
    """What one folder may import: `rooms` are project paths (a folder, or one module of it), `third` are top-level
    packages. The standard library and src/forkpoint's own modules are free to all."""

    rooms: frozenset[str] = frozenset()
    third: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Ban:
    """A dotted name that must not be called or imported, what to use, and the paths (prefixes) where it is fine."""

    replacement: str
    fine_in: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """One file: `path` relative to the repository root, with forward slashes."""

    path: str
    text: str
    nodes: tuple[ast.AST, ...] = field(repr=False)
    """Of its syntax tree, all of them."""

    @classmethod
    def of(cls, path: str, text: str) -> "Source":
        return cls(path, text, tuple(ast.walk(ast.parse(text, path))))


def sources(folders: Iterable[str]) -> Iterator[Source]:
    """Every hand-written Python file under `folders` (generated stubs are left out)."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT).as_posix()
            if not STUB.search(relative) and "__pycache__" not in relative:
                yield Source.of(relative, path.read_text(encoding="utf-8"))


def room_of(path: str, rooms: Mapping[str, Room]) -> str | None:
    """The longest key of `rooms` that is `path` or a folder above it."""
    above = [key for key in rooms if path == key or path.startswith(key + "/")]
    return max(above, key=len, default=None)


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, those inside functions and TYPE_CHECKING blocks too.

    `from a.b import c` yields `a.b.c` when `a.b` is a project package (c may be a module), else `a.b`.
    """
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level + (node.module or "")
            elif node.module and node.module.split(".")[0] == "forkpoint":
                for alias in node.names:
                    yield node.lineno, f"{node.module}.{alias.name}"
            elif node.module:
                yield node.lineno, node.module


def import_problems(source: Source, rooms: Mapping[str, Room], linked: frozenset[str]) -> Iterator[str]:
    """Imports that the matrix does not allow."""
    own = room_of(source.path, rooms)
    if own is None:
        yield f"{source.path}: in no room of the import matrix"
        return
    for line, module in imported_modules(source):
        place = f"{source.path}:{line}"
        if module.startswith("."):
            yield f"{place}: relative import {module}: write forkpoint.… in full"
            continue
        top, *rest = module.split(".")
        if top == "forkpoint":
            target = "/".join(rest)
            if rest and rest[0] in linked:
                # proto's generated modules hold many names; a room is allowed as a whole or by one module of it.
                allowed = rooms[own].rooms | {own}
                if not any(target == key or target.startswith(key + "/") for key in allowed):
                    yield f"{place}: {own} may not import {target}"
        elif top not in sys.stdlib_module_names and top not in rooms[own].third:
            yield f"{place}: {own} may not import the third party {top}"


def _aliases(source: Source) -> dict[str, str]:
    """Local name -> dotted name, for `import time as t` and `from time import monotonic`."""
    names: dict[str, str] = {}
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _dotted(node: ast.expr, aliases: Mapping[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, aliases)
        return f"{base}.{node.attr}" if base else None
    return None


def banned_names(source: Source, bans: Mapping[str, Ban]) -> Iterator[str]:
    """Uses and imports of banned names, whatever they were imported as."""
    aliases = _aliases(source)
    seen: set[tuple[int, str]] = set()
    for node in source.nodes:
        found: list[str] = []
        if isinstance(node, ast.Attribute | ast.Name):
            name = _dotted(node, aliases)
            found = [name] if name else []
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in found:
            ban = bans.get(name)
            line = getattr(node, "lineno", 0)
            if ban and not source.path.startswith(ban.fine_in) and (line, name) not in seen:
                seen.add((line, name))
                yield f"{source.path}:{line}: {name} is banned: {ban.replacement}"


def banned_statements(source: Source) -> Iterator[str]:
    """Bare or swallowing handlers, stubs that raise NotImplementedError, tasks without an owner, reminders."""
    lines = source.text.splitlines()
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler):
            empty = all(isinstance(child, ast.Pass) or _is_ellipsis(child) for child in node.body)
            broad = isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"}
            if node.type is None:
                yield f"{source.path}:{node.lineno}: bare except: name the errors"
            elif broad and empty:
                yield f"{source.path}:{node.lineno}: swallows every error: name the errors, or log and re-raise"
        elif isinstance(node, ast.Raise) and node.exc is not None:
            target = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(target, ast.Name) and target.id == "NotImplementedError":
                yield f"{source.path}:{node.lineno}: NotImplementedError: build it, or refuse with a ForkpointError"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "create_task":
            owner = node.func.value
            grouped = (isinstance(owner, ast.Name) and "group" in owner.id) or _attribute_has(owner, "group")
            comment = " ".join(lines[max(0, node.lineno - 2) : node.end_lineno])
            if not grouped and "owner:" not in comment:
                yield (
                    f"{source.path}:{node.lineno}: bare create_task: use a TaskGroup, or say who awaits it in a "
                    "comment 'owner: …'"
                )
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and re.search(r"\b(TO" r"DO|FIX" r"ME|XXX)\b", token.string):
            yield f"{source.path}:{token.start[0]}: a reminder in a comment: do it, or file an issue"


def _is_ellipsis(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


def _attribute_has(node: ast.expr, word: str) -> bool:
    return isinstance(node, ast.Attribute) and word in node.attr


def size_problems(source: Source, file_lines_max: int, function_lines_max: int) -> Iterator[str]:
    """Files and functions that grew too long."""
    count = len(source.text.splitlines())
    if count > file_lines_max:
        yield f"{source.path}: {count} lines, at most {file_lines_max}: one noun a file"
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > function_lines_max:
                yield f"{source.path}:{node.lineno}: {node.name} has {length} lines, at most {function_lines_max}"


@cache
def names_of_tests(path: Path) -> set[str]:
    """Names of the test functions and methods in a file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {
        n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name.startswith("test")
    }
