"""Redis URLs: what they may say, and that no error shows a password."""

import pytest

from forkpoint.errors import ConfigError
from forkpoint.statestore.open import open_catalog, shown_url
from forkpoint.statestore.records import Durability
from forkpoint.statestore.redis.catalog import RedisCatalog
from forkpoint.statestore.redis.pack import APART_BYTES, pack
from forkpoint.statestore.redis.slots import SlotMap, slot_of
from forkpoint.statestore.redis.url import RedisUrl, TlsOptions, parse_redis_url


def parsed(url: str) -> RedisUrl:
    return parse_redis_url("catalog", url)


def test_hosts_ports_databases_and_credentials() -> None:
    url = parsed("redis://us%40er:p%3Aw%2Fd@a,b:1,[::1]:2,[::2]/3")
    assert url.hosts == (("a", 6379), ("b", 1), ("::1", 2), ("::2", 6379))
    assert (url.db, url.username, url.password, url.service, url.tls) == (3, "us@er", "p:w/d", None, None)
    assert url.shown == "redis://a,b:1,[::1]:2,[::2]/3"
    only_password = parsed("redis://:pw@a")
    assert (only_password.username, only_password.password) == (None, "pw")


@pytest.mark.parametrize("scheme", ["redis", "valkey"])
def test_plain_urls_speak_no_tls_and_secure_ones_verify(scheme: str) -> None:
    secure = {"redis": "rediss", "valkey": "valkeys"}[scheme]
    assert parsed(f"{scheme}://h").tls is None
    assert parsed(f"{secure}://h").tls == TlsOptions()
    options = parsed(f"{secure}://h?ca=/ca&cert=/c&key=/k&check_hostname=no").tls
    assert options == TlsOptions("/ca", "/c", "/k", False)
    assert parsed(f"{secure}+sentinel://h/service").tls == TlsOptions()


def test_sentinels_are_asked_for_a_service() -> None:
    url = parsed("redis+sentinel://a,b:5/prime/2")
    assert (url.hosts, url.service, url.db) == ((("a", 26379), ("b", 5)), "prime", 2)
    asked = parsed("redis+sentinel://:pw@a/prime?sentinel_password=other")
    assert (asked.password, asked.sentinel_username, asked.sentinel_password) == ("pw", None, "other")


def test_options_are_read() -> None:
    url = parsed("valkey://h?namespace=n&durability=replicated&wait=2&wait_ms=50&timeout=1.5&connections=3")
    assert (url.namespace, url.durability, url.wait, url.wait_ms) == ("n", Durability.REPLICATED, 2, 50)
    assert (url.timeout, url.connections) == (1.5, 3)


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        ("", "names no host"),
        ("h:0", "the port is '0'"),
        ("h:99999", "the port"),
        ("h:x", "the port is 'x'"),
        ("h/x", "the database is 'x'"),
        ("h/1/2", "2 parts"),
        ("h#f", "fragment"),
        ("h?nonsense=1", "no option 'nonsense'"),
        ("h?ca=/ca", "no option 'ca'"),
        ("h?sentinel_password=x", "no option 'sentinel_password'"),
        ("h?wait=-1", "wait is '-1'"),
        ("h?wait=x", "wait is 'x'"),
        ("h?timeout=0", "timeout is '0'"),
        ("h?timeout=nan", "timeout is 'nan'"),
        ("h?durability=paper", "one of memory, local_fsync, replicated"),
        ("h?durability=replicated", "needs wait=N or waitaof=N"),
        ("h?appendfsync=sometimes", "one of always"),
        ("[::1", "no host:port|Invalid IPv6"),
    ],
)
def test_a_wrong_url_says_what_is_wrong_and_hides_the_password(rest: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        open_catalog(f"redis://user:secret@{rest}")
    assert "secret" not in str(refused.value)
    assert refused.value.key == "catalog"


def test_a_sentinel_url_names_a_service() -> None:
    with pytest.raises(ConfigError, match="names no service"):
        parsed("redis+sentinel://h")


def test_catalogs_open_by_url_and_urls_are_shown_without_secrets() -> None:
    for url in ("redis://h", "rediss://h", "valkey://h", "redis+sentinel://h/s"):
        assert isinstance(open_catalog(url), RedisCatalog)
    assert shown_url("redis://u:p@h:1/2?timeout=1") == "redis://h:1/2"
    assert shown_url("sqlite:///a/b") == "sqlite:///a/b"


def test_keys_of_one_workflow_share_a_slot() -> None:
    assert slot_of("forkpoint:{default:w:a}") == slot_of("forkpoint:{default:w:a}:request:2:me:x{y}")
    assert slot_of("123456789") == 12739


def test_a_slot_map_follows_moves_and_fills_in_the_host_that_was_asked() -> None:
    slots = SlotMap([[0, 8191, [b"", 1, b"id"]], [8192, 16383, [b"b", 2, b"id"], [b"c", 3, b"id"]]], ("a", 9))
    assert (slots.primary(0), slots.primary(16383), slots.complete) == (("a", 1), ("b", 2), True)
    slots.move(5, ("d", 4))
    assert slots.primary(5) == ("d", 4)
    assert slots.primaries() == [("a", 1), ("d", 4), ("b", 2)]
    assert SlotMap([], ("a", 1)).primary(3) is None


def test_commands_are_packed_as_bulk_strings_and_long_ones_are_not_copied() -> None:
    long = bytes(APART_BYTES + 1)
    view = memoryview(bytearray(b"view"))
    pieces = pack([("SET", "kéy", b"\x00\r\n", -5, 1.5, view), ("GET", long, "")])
    assert b"".join(pieces) == (
        b"*6\r\n$3\r\nSET\r\n$4\r\nk\xc3\xa9y\r\n$3\r\n\x00\r\n\r\n$2\r\n-5\r\n$3\r\n1.5\r\n$4\r\nview\r\n"
        b"*3\r\n$3\r\nGET\r\n$8193\r\n" + long + b"\r\n$0\r\n\r\n"
    )
    assert any(piece is long for piece in pieces)
