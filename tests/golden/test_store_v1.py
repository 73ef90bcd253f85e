"""Version 1 of the store's formats, as released: what was written then is read now, and written the same."""

import pytest

from forkpoint.statestore.codec import decode, digest_of
from forkpoint.statestore.logrecord import decode_record, unpack_logprobs
from forkpoint.statestore.manifest import unseal
from forkpoint.statestore.records import Kind
from tests.golden.make_store import FOLDER, RAW, TOKENS, ZEROS, chain_after, files, manifest


def stored(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


@pytest.mark.parametrize("name", sorted(set(files()) - {"zstd.frame"}))
def test_what_is_written_today_is_what_version_1_wrote(name: str) -> None:
    assert files()[name] == stored(name)


def test_frames_of_version_1_are_read() -> None:
    assert decode(digest_of(RAW), stored("raw.frame")) == RAW
    assert decode(digest_of(ZEROS), stored("zstd.frame")) == ZEROS
    assert stored("raw.frame")[:6] == b"FPBF\x01\x00"
    assert stored("zstd.frame")[:6] == b"FPBF\x01\x01"


def test_the_manifest_of_version_1_is_read() -> None:
    assert unseal(stored("manifest.bin")) == manifest()


def test_log_records_of_version_1_are_read() -> None:
    first = decode_record(stored("prompt.record"), 1, 0)
    second = decode_record(stored("generated.record"), 1, 35)
    assert (first.kind, first.epoch, first.stop, first.logprobs) == (Kind.PROMPT, 1, 35, b"")
    assert (second.kind, second.epoch, second.stop) == (Kind.GENERATED, 2, 40)
    assert second.chain == chain_after(TOKENS[:32]).grid_hash
    assert unpack_logprobs(second.logprobs, 5) == [-0.5, None, -1.25, None, -3.0]


def test_the_head_hash_of_version_1_is_reached() -> None:
    assert stored("head_hash.hex").decode().strip() == chain_after(TOKENS).head_hash().hex()
