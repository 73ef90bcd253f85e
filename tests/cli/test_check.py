"""`forkpoint check` over tiers, and what --repair says and does."""

import asyncio
import json
from pathlib import Path

import pytest

from forkpoint.cli.main import main
from forkpoint.statestore.calls import AppendTokens
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.open import open_blobs, open_catalog
from forkpoint.statestore.redis.blobheader import BlobKeys
from tests.statestore.test_checkpoint_store import POINTS, SPECS, TOKENS, content
from tests.support.redis_servers import redis_server
from tests.support.store import MARKER, name, owned


async def make_store(catalog_url: str, blobs_setting: str) -> str:
    """One session with one checkpoint; returns the digest of its first part."""
    catalog, blobs = open_catalog(catalog_url), open_blobs(blobs_setting)
    await catalog.open(MARKER)
    await blobs.open()
    await owned(catalog, "s")
    await catalog.append(AppendTokens(name("s"), 1, TOKENS))
    saved = await CheckpointStore(catalog, blobs).save(
        session=name("s"),
        epoch=1,
        checkpoint="c",
        position=50,
        grid_position=48,
        chain_hash=POINTS[48],
        numerics_ids=["n"],
        model_digest=MARKER.model_digest,
        tokenizer_digest=MARKER.tokenizer_digest,
        layout="tiny/1",
        parts=[(spec, content(spec)) for spec in SPECS],
    )
    await blobs.close()
    await catalog.close()
    return saved.parts[0].digest


class Tool:
    """The verb, run in this process on a store of two tiers of files."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        catalog, tiers = f"sqlite://{folder}/catalog.db", [f"file://{folder}/local", f"file://{folder}/shared"]
        self.digest = asyncio.run(make_store(catalog, " ".join(tiers)))
        self._urls = ["--catalog", catalog, *(part for tier in tiers for part in ("--blobs", tier))]
        self._homes = [folder / tier / "blobs" / self.digest[:2] for tier in ("local", "shared")]

    def file(self, tier: int) -> Path:
        """The first part's blob in a tier."""
        return self._homes[tier] / self.digest

    def run(self, *options: str, status: int = 0) -> str:
        assert main(["check", *self._urls, *options]) == status
        return self._capsys.readouterr().out

    def kinds(self, *options: str, status: int = 0) -> list[tuple[str, bool]]:
        document = json.loads(self.run("--json", *options, status=status))
        return [(finding["kind"], finding.get("repaired", False)) for finding in document["findings"]]


@pytest.fixture
def tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Tool:
    return Tool(tmp_path, capsys)


def test_a_sound_store_has_nothing_to_say(tool: Tool) -> None:
    assert tool.run() == "0 errors, 0 warnings\n"
    assert tool.run("--repair") == "0 errors, 0 warnings, 0 repaired\n"
    assert json.loads(tool.run("--json")) == {"errors": 0, "warnings": 0, "findings": []}


def test_a_damaged_copy_is_mended_from_the_other_tier(tool: Tool) -> None:
    sound = tool.file(1).read_bytes()
    tool.file(1).write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    assert tool.kinds() == [("TIER_BLOB_DAMAGED", False)]
    shown = tool.run("--repair")
    assert "done: put whole into file-2" in " ".join(shown.split())
    assert shown.endswith("0 errors, 0 warnings, 1 repaired\n")
    assert tool.file(1).read_bytes() == sound
    assert tool.kinds() == []


def test_what_can_not_be_mended_stays_an_error(tool: Tool) -> None:
    tool.file(0).write_bytes(b"noise")
    tool.file(1).unlink()
    assert tool.kinds(status=1) == [("BLOB_DAMAGED", False)]
    document = json.loads(tool.run("--json", "--repair", status=1))
    assert (document["errors"], document["repaired"]) == (1, 0)
    (finding,) = document["findings"]
    assert finding["repair"].startswith("no tier has a whole copy")
    assert tool.file(0).read_bytes() == b"noise" and not tool.file(1).exists()


def test_a_place_that_is_not_there_is_an_error_and_not_made(
    tool: Tool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = ["--catalog", f"sqlite://{tmp_path}/catalog.db", "--blobs", f"file://{tmp_path}/nowhere"]
    assert main(["check", *urls]) != 0
    assert "CONFIG" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


def test_a_store_on_redis_is_checked_and_swept(capsys: pytest.CaptureFixture[str]) -> None:
    with redis_server("valkey") as server:
        digest = asyncio.run(make_store(server.url(), server.url()))
        urls = ["check", "--catalog", server.url(), "--blobs", server.url()]
        assert main(urls) == 0
        assert capsys.readouterr().out == "0 errors, 0 warnings\n"
        left_over = f"{BlobKeys(MARKER.namespace).header(digest)}:0123456789abcdef:0"
        server.command("SET", left_over, b"of an upload that was replaced")
        assert main([*urls, "--json", "--repair"]) == 0
        (finding,) = json.loads(capsys.readouterr().out)["findings"]
        assert (finding["kind"], finding["repaired"], finding["repair"]) == ("ORPHAN_CHUNKS", True, "removed")
        assert server.command("EXISTS", left_over) == 0
        server.command("DEL", BlobKeys(MARKER.namespace).header(digest))
        assert main([*urls, "--json"]) == 1
        kinds = {finding["kind"] for finding in json.loads(capsys.readouterr().out)["findings"]}
        assert kinds == {"BLOB_MISSING", "ORPHAN_CHUNKS"}
