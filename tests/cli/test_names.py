"""Names on the command line may be short."""

import pytest

from forkpoint.cli.names import checkpoint_name, session_name, short, split_session, workflow_name
from forkpoint.errors import InvalidFieldError


def test_short_and_full_names_mean_the_same() -> None:
    assert workflow_name("w") == workflow_name("workflows/w") == "workflows/w"
    assert session_name("w/s") == session_name("workflows/w/sessions/s") == "workflows/w/sessions/s"
    full = "workflows/w/sessions/s/checkpoints/c"
    assert checkpoint_name("w/s/c") == checkpoint_name(full) == full
    assert split_session("w/s") == ("workflows/w", "s")


def test_a_full_name_is_shortened_for_tables() -> None:
    assert short("workflows/w") == "w"
    assert short("workflows/w/sessions/s/checkpoints/c") == "w/s/c"
    assert short("nodes/n") == "nodes/n"


@pytest.mark.parametrize(
    "text", ["", "w", "w/", "/s", "w/s/c", "W/s", "workflows/w", "workflows/w/sessions/", "a/b/c/d"]
)
def test_what_is_no_session_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidFieldError):
        session_name(text)


@pytest.mark.parametrize("text", ["w", "w/s", "w/s/C!", "workflows/w/sessions/s/checkpoints/", "a/b/c/d/e/f"])
def test_what_is_no_checkpoint_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidFieldError):
        checkpoint_name(text)


@pytest.mark.parametrize("text", ["", "workflows/", "a b", "nodes/n"])
def test_what_is_no_workflow_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidFieldError):
        workflow_name(text)
