"""Log records: every damaged bit is found."""

from dataclasses import replace

import pytest

from forkpoint.errors import LogCorruptError
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, StepCommit
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.logrecord import LogRecord, decode_record, encode_record, write_records
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.records import Kind
from tests.support.store import MARKER, PARAMS, name, owned

RECORD = LogRecord(3, 35, 2, Kind.GENERATED, bytes(range(32)), b"\1\0\0\0\2\0\0\0", bytes(16))


@pytest.mark.parametrize("record", [RECORD, LogRecord(0, 0, 0, Kind.PROMPT, bytes(32), b"\1\2\3\4")])
def test_every_flipped_bit_and_every_truncation_of_a_record_is_detected(record: LogRecord) -> None:
    data = encode_record(record)
    assert decode_record(data, record.branch, record.start) == record
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"."):
            decode_record(bytes(damaged), record.branch, record.start)
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"."):
            decode_record(data[:length], record.branch, record.start)


def test_a_whole_record_at_another_place_is_detected() -> None:
    data = encode_record(RECORD)
    for branch, start in ((4, 35), (3, 36)):
        with pytest.raises(ValueError, match="lies at"):
            decode_record(data, branch, start)


async def filled() -> MemoryCatalog:
    catalog = MemoryCatalog()
    await catalog.open(MARKER)
    await owned(catalog, "s")
    await catalog.append(AppendTokens(name("s"), 1, tuple(range(5))))
    await catalog.append(AppendTokens(name("s"), 1, tuple(range(20))))
    await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (1,)))
    for step in range(9):
        await catalog.commit_step([StepCommit(name("s"), 1, 26 + step, (step,), "g", (-0.5,))])
    return catalog


async def test_every_flipped_bit_of_a_whole_log_is_detected_on_reading() -> None:
    catalog = await filled()
    records = catalog._tables.branches[0].records
    starts = catalog._tables.branches[0].starts
    for index, record in enumerate(list(records)):
        for bit in range(len(record) * 8):
            damaged = bytearray(record)
            damaged[bit // 8] ^= 1 << bit % 8
            records[index] = bytes(damaged)
            with pytest.raises(LogCorruptError) as raised:
                await catalog.read_log(name("s"), 0, 100)
            assert raised.value.first_bad_position == starts[index]
        records[index] = record
    assert len((await catalog.read_log(name("s"), 0, 100)).token_ids) == 35


async def test_a_record_of_another_history_breaks_the_chain_even_with_a_right_checksum() -> None:
    catalog = await filled()
    branch = catalog._tables.branches[0]
    original = decode_record(branch.records[1], 0, 5)
    forged = LogRecord(0, 5, 1, Kind.PROMPT, original.chain, original.tokens[:-4] + b"\xff\0\0\0", b"")
    branch.records[1] = encode_record(forged)
    with pytest.raises(LogCorruptError, match=r"chain|head hash"):
        await catalog.read_log(name("s"), 0, 100)


async def appended(token: int) -> MemoryCatalog:
    """Four records of 20 equal tokens."""
    catalog = MemoryCatalog()
    await catalog.open(MARKER)
    await owned(catalog, "s")
    for _ in range(4):
        await catalog.append(AppendTokens(name("s"), 1, (token,) * 20))
    return catalog


async def test_a_record_of_another_history_is_found_by_the_one_after_it_though_the_read_ends_before_the_head() -> None:
    """As a misdirected write leaves it: its checksum and its place are right, and so is the chain before it."""
    catalog = await appended(1)
    records = catalog._tables.branches[0].records
    whole = decode_record(records[1], 0, 20)
    other = decode_record((await appended(2))._tables.branches[0].records[1], 0, 20)
    records[1] = encode_record(replace(other, chain=whole.chain))
    for start, limit in ((0, 50), (20, 40), (30, 20)):
        with pytest.raises(LogCorruptError, match="the hash chain does not fit") as raised:
            await catalog.read_log(name("s"), start, limit)
        assert raised.value.first_bad_position == 16
    assert (await catalog.read_log(name("s"), 0, 20)).token_ids == (1,) * 20
    assert (await catalog.read_log(name("s"), 60, 20)).token_ids == (1,) * 20


def test_a_long_append_is_cut_into_records_that_join() -> None:
    chain = HashChain(3, bytes(32), b"\1\0\0\0" * 3)
    records = [
        decode_record(data, 1, start) for start, data in write_records(1, chain, 1, Kind.PROMPT, range(10_000), ())
    ]
    assert [(record.start, record.stop) for record in records] == [(3, 4099), (4099, 8195), (8195, 10_003)]
    assert chain.position == 10_003
