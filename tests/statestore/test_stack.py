"""Blob stores by setting: what a URL may say, and what it makes."""

from pathlib import Path

import pytest

from forkpoint.errors import ConfigError
from forkpoint.statestore.codec import digest_of
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.lru import HostMemoryBlobs
from forkpoint.statestore.redis.blobs import RedisBlobs
from forkpoint.statestore.stack import open_stack, parse_blobs
from forkpoint.statestore.tiers import Role, TieredBlobs
from forkpoint.statestore.wrappers.forward import innermost
from forkpoint.statestore.wrappers.limit import LimitedBlobs
from forkpoint.statestore.wrappers.retry import RetryingBlobs

DIGEST = digest_of(b"x")


async def test_one_url_is_one_backend(tmp_path: Path) -> None:
    assert isinstance(open_stack("memory://"), MemoryBlobs)
    files = open_stack(f"file://{tmp_path}/with%20space")
    assert isinstance(files, FileBlobs) and not files.survives_node
    assert (tmp_path / "with space" / "blobs").is_dir()
    await files.close()
    shared = open_stack(f"file://{tmp_path}/shared?shared=true&parallel=3&tries=2")
    assert isinstance(shared, RetryingBlobs) and isinstance(shared.inner, LimitedBlobs)
    assert isinstance(innermost(shared), FileBlobs) and shared.survives_node
    await shared.close()
    redis = open_stack("redis://:secret@host:1/2?timeout=3")
    assert isinstance(redis, RetryingBlobs) and isinstance(redis.inner, RedisBlobs)
    assert isinstance(open_stack("valkeys+sentinel://a,b/primary?tries=1"), RedisBlobs)


def test_on_a_redis_the_catalogs_namespace_keeps_its_blobs_apart_unless_the_url_says_another() -> None:
    ours = innermost(open_stack("redis://host", namespace="ours"))
    theirs = innermost(open_stack("redis://host?namespace=theirs", namespace="ours"))
    assert isinstance(ours, RedisBlobs) and isinstance(theirs, RedisBlobs)
    assert "{ours:b:" in ours._keys.header(DIGEST)
    assert "{theirs:b:" in theirs._keys.header(DIGEST)


async def test_several_urls_are_tiers_in_their_order(tmp_path: Path) -> None:
    setting = f"host://2MiB  file://{tmp_path}/fast?tier=cache\n file://{tmp_path}/a file://{tmp_path}/b?shared=true"
    blobs = open_stack(setting)
    assert isinstance(blobs, TieredBlobs)
    assert [(tier.label, tier.role) for tier in blobs.tiers] == [
        ("host", Role.CACHE),
        ("file", Role.CACHE),
        ("file-2", Role.DURABLE),
        ("file-3", Role.DURABLE),
    ]
    host = blobs.tiers[0].blobs
    assert isinstance(host, HostMemoryBlobs) and host.budget_bytes == 2 << 20
    await blobs.open()
    await blobs.put(DIGEST, b"frame")
    await blobs.settle()
    assert await blobs.where(DIGEST) == ("host", "file", "file-2", "file-3")
    assert blobs.survives_node
    await blobs.close()


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("", "names no store"),
        ("   ", "names no store"),
        ("relative", "no such blob store"),
        ("s3://bucket", "no such blob store"),
        ("sqlite:///path", "no such blob store"),
        ("memory://host", "nothing behind it"),
        ("memory:///path", "nothing behind it"),
        ("file://host/path", "absolute"),
        ("file:relative", "absolute"),
        ("file:///", "absolute"),
        ("file:///a#b", "absolute"),
        ("file:///a?tier=fast", "tier is 'fast', expected one of cache, durable"),
        ("file:///a?shared=yes", "shared is 'yes'"),
        ("file:///a?tries=0", "tries is '0'"),
        ("file:///a?tries=x", "tries is 'x'"),
        ("file:///a?parallel=-1", "parallel is '-1'"),
        ("file:///a?timeout=1", "no option 'timeout'"),
        ("redis://host?shared=true", "no option 'shared'"),
        ("redis://host?timeuot=1", "no option 'timeuot'"),
        ("redis://host:99999", "port"),
        ("host://", "expected host://SIZE"),
        ("host://2GB", "expected host://SIZE"),
        ("host://0MiB", "expected host://SIZE"),
        ("host://1GiB/x", "expected host://SIZE"),
        ("host://1GiB", "is a cache"),
        ("host://1GiB redis://host?tier=cache", "is a cache"),
        ("host://1GiB?tier=durable memory://", "can only be a cache"),
    ],
)
def test_a_setting_that_makes_no_sense_says_what_would(setting: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        open_stack(setting)
    assert raised.value.key == "blobs"


@pytest.mark.parametrize("setting", ["redis://me:secret@host?nonsense=1", "ftp://me:secret@host/x"])
def test_an_error_shows_no_password(setting: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_blobs(setting)
    assert "secret" not in str(raised.value)
    assert "host" in str(raised.value)


def test_where_files_lie_is_known_before_anything_is_opened(tmp_path: Path) -> None:
    urls = parse_blobs(f"host://1MiB file://{tmp_path}/with%20space redis://host")
    assert [url.folder for url in urls] == [None, tmp_path / "with space", None]
    assert list(tmp_path.iterdir()) == []
