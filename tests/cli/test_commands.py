"""The command line against a real server, each command in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli


@pytest.fixture(scope="module")
def reader(cli: Cli) -> str:
    """A session with one turn in it."""
    cli.run("session", "create", "books/reader", "--seed", "7", "--create-workflow", "--label", "kind=test")
    cli.run("generate", "books/reader", "--user", "memo kola = abc123", "--max-tokens", "8")
    return "books/reader"


def test_a_session_is_created_listed_and_shown(cli: Cli, reader: str) -> None:
    shown = cli.json("session", "show", reader)
    assert shown["name"] == "workflows/books/sessions/reader"
    assert (shown["seed"], shown["labels"], shown["state"]) == (7, {"kind": "test"}, "ACTIVE")
    assert shown["head"] == shown["prompt_tokens"] + shown["generated_tokens"] > 0
    assert [s["name"] for s in cli.json("session", "list", "books") if s["name"] == shown["name"]]
    assert "books/reader" in cli.text("session", "list")
    assert "seed" in cli.text("session", "show", reader)


def test_a_generation_streams_text_and_json_and_is_attached_to_again_by_its_id(cli: Cli, reader: str) -> None:
    turn = ("generate", reader, "--user", "recall kola", "--max-tokens", "8", "--request-id", "turn-2")
    *chunks, end = cli.lines(*turn, "--logprobs")
    text = "".join(chunk["text"] for chunk in chunks)
    assert text == "abc123" and end["finished"] == "STOP" and end["request_id"] == "turn-2"
    ids = [token for chunk in chunks for token in chunk["token_ids"]]
    assert sum(len(chunk["logprobs"]) for chunk in chunks) == len(ids)
    again = cli.lines(*turn, "--logprobs", "--resume-position", str(end["head"] - 2))
    assert [token for chunk in again[:-1] for token in chunk["token_ids"]] == ids[-2:]
    assert again[-1]["head"] == end["head"]
    assert "error: REQUEST_ID_REUSED: " in cli.error("generate", reader, "--text", "x", "--request-id", "turn-2")


def test_tokens_are_printed_as_ids_json_and_text(cli: Cli, reader: str) -> None:
    head = cli.json("session", "show", reader)["head"]
    ids = [int(word) for word in cli.text("session", "tokens", reader).split()]
    assert len(ids) == head
    lines = cli.lines("session", "tokens", reader, "--start", "5", "--end", "9")
    assert [token for line in lines for token in line["token_ids"]] == ids[5:9] and lines[0]["start"] == 5
    assert cli.text("session", "tokens", reader, "--text").startswith("memo kola = abc123")


def test_forks_make_a_tree_and_a_rewind_goes_back(cli: Cli, reader: str) -> None:
    head = cli.json("session", "show", reader)["head"]
    children = cli.json("session", "fork", reader, "--id", "left", "--id", "right", "--position", str(head - 3))
    assert [c["name"].rpartition("/")[2] for c in children] == ["left", "right"]
    assert {c["fork_position"] for c in children} == {head - 3}
    tree = cli.text("session", "tree", "books")
    assert "├── books/left" in tree and f"from {head - 3:,}" in tree
    assert {"name", "parent", "fork_position", "head", "state"} == cli.json("session", "tree", "books")[0].keys()
    assert cli.json("session", "rewind", "books/left", "--position", "4")["head"] == 4
    assert cli.json("session", "show", reader)["head"] == head
    assert "error: POSITION_BEYOND_HEAD: " in cli.error("session", "rewind", "books/left", "--position", "99999")
    assert "error: INVALID_FIELD: --count" in cli.error("session", "fork", reader, "--id", "x1", "--count", "3")


def test_pause_and_resume_restore_the_session(cli: Cli, reader: str) -> None:
    assert cli.json("session", "pause", reader)["state"] == "PAUSED"
    assert "error: SESSION_PAUSED: " in cli.error("generate", reader, "--text", "x")
    answer = cli.json("session", "resume", reader)
    assert answer["exact"] and answer["session"]["state"] == "ACTIVE"
    assert answer["restored_tokens"] % 16 == 0
    assert answer["restored_tokens"] + answer["replayed_tokens"] == answer["session"]["head"]
    cli.run("session", "pause", reader)
    assert "restored" in cli.text("session", "resume", reader)
    assert cli.json("session", "cancel", reader)["state"] == "ACTIVE"


def test_deleted_sessions_are_hidden_and_come_back(cli: Cli, reader: str) -> None:
    cli.run("session", "fork", reader, "--id", "gone")
    assert cli.json("session", "delete", "books/gone")["state"] == "DELETED"
    names = [s["name"].rpartition("/")[2] for s in cli.json("session", "list", "books")]
    assert "gone" not in names and "reader" in names
    assert "books/gone" in cli.text("session", "list", "books", "--deleted")
    assert cli.run("session", "fork", "books/gone", status=1).stderr.startswith(b"error: ")
    assert cli.json("session", "undelete", "books/gone")["state"] == "PAUSED"


def test_checkpoints_are_created_listed_shown_and_verified(cli: Cli, reader: str) -> None:
    made = cli.json("checkpoint", "create", reader, "--id", "here")
    assert made["bytes_total"] == sum(part["bytes"] for part in made["parts"])
    assert 0 < made["bytes_stored"] + made["bytes_shared"] <= made["bytes_total"] + 32 * len(made["parts"])
    assert made["grid_position"] == made["position"] // 16 * 16
    assert made["durability"] == "LOCAL_FSYNC"
    listed = cli.json("checkpoint", "list", reader)
    assert "here" in [c["name"].rpartition("/")[2] for c in listed] and "books/reader/here" in cli.text(
        "checkpoint", "list", reader
    )
    assert cli.json("checkpoint", "show", f"{reader}/here")["parts"] == made["parts"]
    assert "kda." in cli.text("checkpoint", "show", f"{reader}/here")
    verified = cli.json("checkpoint", "verify", f"{reader}/here")
    assert verified["parts_checked"] == len(made["parts"]) and verified["damaged"] == []
    assert "parts checked" in cli.text("checkpoint", "verify", f"{reader}/here")


def test_a_checkpoint_is_deleted_and_collected(cli: Cli, store: Path) -> None:
    cli.run("session", "create", "rubbish/s", "--create-workflow")
    cli.run("generate", "rubbish/s", "--text", "import this\nimport that\n", "--max-tokens", "4")
    cli.run("checkpoint", "create", "rubbish/s", "--id", "c")
    assert cli.json("checkpoint", "create", "rubbish/s", "--id", "d", "--ttl", "3600")["expire_time"]
    assert "deleted" in cli.text("checkpoint", "delete", "rubbish/s/c")
    assert "NOT_FOUND" in cli.error("checkpoint", "delete", "rubbish/s/c")
    (tier,) = cli.json("gc", "--dry-run")["tiers"]
    assert (tier["stopped"], len(tier["tier"])) == ("", 32)
    assert "stay" in cli.text("gc")
    urls = ("--catalog", f"sqlite://{store / 'catalog.sqlite'}", "--blobs", f"file://{store / 'blobs'}")
    here = cli.json("gc", "--dry-run", *urls)
    assert (here["dry_run"], here["tiers"][0]["tier"]) == (True, tier["tier"])
    assert "COLLECTED_ELSEWHERE" in cli.error("gc", *urls), "the server collects"
    assert cli.json("check", *urls)["errors"] == 0
    for wrong in (("--catalog", urls[1]), (*urls, "--keep-last", "1"), ("--catalog", "sqlite:///no/such", *urls[2:])):
        assert "CONFIG" in cli.error("gc", *wrong)


def test_a_damaged_checkpoint_fails_verify_and_check(cli: Cli, store: Path) -> None:
    cli.run("session", "create", "damage/s", "--create-workflow")
    cli.run("generate", "damage/s", "--text", "import os\nimport sys\nimport re\n", "--max-tokens", "4")
    made = cli.json("checkpoint", "create", "damage/s", "--id", "c")
    urls = ("--catalog", f"sqlite://{store / 'catalog.sqlite'}", "--blobs", f"file://{store / 'blobs'}")
    assert cli.json("check", *urls)["errors"] == 0
    victim = made["parts"][0]["blake3"]
    (file,) = [
        path
        for path in (store / "blobs").rglob("*")
        if path.is_file() and victim[4:] in path.as_posix().replace("/", "")
    ]
    sound = file.read_bytes()
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    try:
        assert b"1 damaged" in cli.run("checkpoint", "verify", "damage/s/c", status=1).stdout
        assert b"BLOB_DAMAGED" in cli.run("check", *urls, status=1).stdout
    finally:
        file.write_bytes(sound)
    assert "0 errors" in cli.text("check", *urls)


def test_an_export_is_imported_with_the_same_tokens(cli: Cli, reader: str, tmp_path: Path) -> None:
    file = tmp_path / "reader.export"
    cli.run("session", "export", reader, str(file))
    assert cli.run("session", "export", reader, "-").stdout == file.read_bytes()
    copy = cli.json("session", "import", "books/copy", str(file), "--request-id", "the-copy")
    again = cli.json("session", "import", "books/copy", str(file), "--request-id", "the-copy")
    assert again["head_hash"] == copy["head_hash"], "the same request again, not another session"
    original = cli.json("session", "show", reader)
    assert (copy["head"], copy["head_hash"]) == (original["head"], original["head_hash"])
    assert "INVALID_FIELD: file" in cli.error("session", "import", "books/cut", "-", stdin=file.read_bytes()[:-3])
    assert "ALREADY_EXISTS" in cli.error("session", "import", "books/copy", str(file))


def test_chat_takes_a_line_a_turn_from_a_pipe(cli: Cli) -> None:
    script = b"memo kola = xyz789\nrecall kola\n/rewind\nrecall kola\n/tokens\n"
    said = cli.text("chat", "talk/c", "--max-tokens", "16", stdin=script).splitlines()
    assert said[0] == "ok" and said[1] == "xyz789" and said[2].startswith("back at ") and said[3] == "xyz789"
    head = cli.json("session", "show", "talk/c")["head"]
    assert said[4] == f"{head:,} tokens"


def test_workflows_are_created_listed_and_counted(cli: Cli, reader: str) -> None:
    assert cli.text("workflow", "create", "papers", "--label", "a=b").strip() == "papers"
    assert "ALREADY_EXISTS" in cli.error("workflow", "create", "papers")
    assert {"name": "workflows/papers", "labels": {"a": "b"}}.items() <= next(
        w for w in cli.json("workflow", "list") if w["name"] == "workflows/papers"
    ).items()
    usage = cli.json("workflow", "usage", "books")
    assert usage["generated_tokens"] > 0 and usage["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("session", "show", "books/nobody"), "NOT_FOUND"),
        (("session", "create", "nowhere/s"), "NOT_FOUND"),
        (("session", "create", "Bad Name/s"), "INVALID_FIELD"),
        (("session", "create", "books/l", "--label", "novalue"), "INVALID_FIELD"),
        (("generate", "books/nobody", "--text", "x"), "NOT_FOUND"),
        (("generate", "books/reader", "--file", "/nonexistent"), "INVALID_FIELD"),
        (("generate", "books/reader", "--temperature", "-1"), "INVALID_FIELD"),
        (("checkpoint", "show", "books/reader/none"), "NOT_FOUND"),
        (("check", "--catalog", "sqlite:///nonexistent/c", "--blobs", "file:///nonexistent/b"), "CONFIG"),
        (("check", "--catalog", "ftp://x", "--blobs", "file:///x"), "CONFIG"),
    ],
)
def test_an_error_is_one_clear_line(cli: Cli, reader: str, arguments: tuple[str, ...], reason: str) -> None:
    assert cli.error(*arguments).startswith(f"error: {reason}: ")


def test_text_that_is_not_utf8_is_refused(cli: Cli, reader: str, tmp_path: Path) -> None:
    head = cli.json("session", "show", reader)["head"]
    (tmp_path / "bad").write_bytes(b"good \xff bad")
    assert "NOT_UTF8" in cli.error("generate", reader, "--file", str(tmp_path / "bad"))
    assert cli.json("session", "show", reader)["head"] == head


def test_generating_on_an_empty_session_is_refused(cli: Cli, reader: str) -> None:
    cli.run("session", "create", "books/empty")
    assert "error: EMPTY_SESSION: " in cli.error("generate", "books/empty")


def test_the_doctor_tells_versions_and_whether_the_server_serves(cli: Cli) -> None:
    assert {"forkpoint", "python", "torch", "apsw"} <= cli.json("doctor").keys()
    assert "serves" in cli.text("doctor", "--server")
    nobody = Cli("127.0.0.1:1")
    assert "NOT_SERVING" in nobody.error("doctor", "--server")
    assert "error: UNAVAILABLE: " in nobody.error("session", "list")


def test_a_reader_that_goes_away_ends_the_command_quietly(cli: Cli, reader: str) -> None:
    command = [sys.executable, "-m", "forkpoint.cli.main", "session", "tokens", reader, "--address", cli.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == b"" and process.returncode == 1
