"""Each verb is imported by itself, and is what it is among all of them."""

import subprocess
import sys

import pytest

from forkpoint.cli.main import VERBS, build_parser


def shown_help(verb: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `forkpoint WORDS --help` prints when `verb` was told beforehand."""
    with pytest.raises(SystemExit) as end:
        build_parser(verb).parse_args([*words, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_alone_is_what_it_is_among_all(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    alone = shown_help(verb, [verb], capsys)
    assert alone.startswith(f"usage: forkpoint {verb} ") and alone == shown_help("", [verb], capsys)


def test_the_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown_help("", [], capsys).splitlines()
    assert [verb for verb in VERBS if [verb] not in [line.split()[:1] for line in lines]] == []


def test_a_verb_is_imported_without_the_others() -> None:
    code = (
        "import sys\n"
        "from forkpoint.cli.main import build_parser\n"
        "build_parser('session').parse_args(['session', 'list'])\n"
        "print(*(name for name in ('forkpoint.cli.chat', 'forkpoint.statestore', 'torch') if name in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
