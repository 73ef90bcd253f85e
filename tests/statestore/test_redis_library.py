"""The library of functions: shipped with the package, named by its digest, and no larger than what is called."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from forkpoint.statestore.redis.lualib import FILES, prefix, source
from tests.support.redis_servers import redis_server
from tests.support.redis_stores import products

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "statestore" / "redis"
NAMES = [*re.findall(r"register_(?:read|write)\('(\w+)'", source()), "commit_step"]


def test_every_file_is_in_the_library_and_in_the_package() -> None:
    files = sorted(path.stem for path in (FOLDER / "lua").glob("*.lua"))
    assert files == sorted(FILES)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shipped = settings["tool"]["setuptools"]["package-data"]["forkpoint.statestore.redis"]
    assert sorted(path.stem for pattern in shipped for path in FOLDER.glob(pattern)) == files


def test_names_carry_the_digest_and_no_placeholder_is_left() -> None:
    assert re.fullmatch(r"forkpoint_[0-9a-f]{12}", prefix())
    assert source().startswith(f"#!lua name={prefix()}\n")
    assert "@" not in source()


def test_every_function_is_called_and_none_is_missing() -> None:
    python = "\n".join(path.read_text() for path in FOLDER.glob("*.py"))
    assert len(NAMES) == len(set(NAMES))
    for name in NAMES:
        assert f'"{name}"' in python, f"nobody calls {name}"


@pytest.mark.parametrize("product", products())
def test_servers_load_it_and_know_which_functions_only_read(product: str) -> None:
    with redis_server(product) as server:
        server.command("FUNCTION", "LOAD", source())
        listed: Any = server.command("FUNCTION", "LIST", "LIBRARYNAME", prefix())
        fields = dict(zip(listed[0][::2], listed[0][1::2], strict=True)) if isinstance(listed[0], list) else listed[0]
        found = {}
        for function in fields[b"functions"]:
            facts = dict(zip(function[::2], function[1::2], strict=True)) if isinstance(function, list) else function
            found[facts[b"name"].decode().removeprefix(f"{prefix()}_")] = b"no-writes" in set(facts[b"flags"])
    assert set(found) == set(NAMES)
    readers = set(re.findall(r"register_read\('(\w+)'", source()))
    assert {name for name, reads in found.items() if reads} == readers
