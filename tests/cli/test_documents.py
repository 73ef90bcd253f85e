"""What the documents tell a newcomer to type or to open is there."""

import re
import shlex
from pathlib import Path

import pytest

from forkpoint.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "docker/README.md", ROOT / "examples/README.md"]
)
_SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands(text: str) -> list[list[str]]:
    """The arguments of each `forkpoint …` line in the shell blocks."""
    lines = [line for block in _SHELL.findall(text) for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("forkpoint ")]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_command_in_a_document_is_one(page: Path) -> None:
    for command in commands(page.read_text(encoding="utf-8")):
        build_parser().parse_args(command)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_in_a_document_leads_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target.partition("#")[0]).exists(), target


def test_the_readme_shows_commands_and_a_wrong_one_would_be_noticed() -> None:
    assert len(commands((ROOT / "README.md").read_text(encoding="utf-8"))) >= 8
    with pytest.raises(SystemExit):
        build_parser().parse_args(commands("```sh\nforkpoint sesion list\n```")[0])


def test_every_decision_record_is_in_the_list() -> None:
    listed = (ROOT / "docs/adr/README.md").read_text(encoding="utf-8")
    for record in (ROOT / "docs/adr").glob("0*.md"):
        assert f"({record.name})" in listed, record.name
        assert re.search(r"^Date: \d{4}-\d\d-\d\d\. Status: \w+", record.read_text(encoding="utf-8"), re.MULTILINE)
