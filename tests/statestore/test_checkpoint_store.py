"""CheckpointStore: whole checkpoints or none, shared blobs, and no byte that was not verified."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
from blake3 import blake3

from forkpoint.errors import (
    BlobDamagedError,
    BlobMissingError,
    StaleEpochError,
    StateIncompatibleError,
    StoreFullError,
    StoreUnavailableError,
)
from forkpoint.parts import PartSpec
from forkpoint.proto.forkpoint.store.v1 import manifest_pb2
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.calls import AppendTokens
from forkpoint.statestore.chain import grid_hashes, root_hash
from forkpoint.statestore.check import Finding, Severity, check
from forkpoint.statestore.checkpoint import CheckpointStore, SavedCheckpoint
from forkpoint.statestore.errors import BlobsCondemnedError
from forkpoint.statestore.manifest import StateIdentity, match_parts, seal, unseal
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.partsaver import InStore, SavedPart
from tests.support.faults import FaultyBlobs, FaultyCatalog
from tests.support.store import MARKER, name, owned, request

SPECS = (
    PartSpec("kda.000.state.0", "float32", (2, 4, 4)),
    PartSpec("kda.000.conv.0", "bfloat16", (3, 24)),
    PartSpec("mla.page.000000", "float32", (1, 48, 40)),
)
IDENTITY = StateIdentity(MARKER.namespace, MARKER.model_digest, MARKER.tokenizer_digest, "tiny/1")
TOKENS = tuple(range(60))
POINTS = dict(grid_hashes(root_hash(MARKER), TOKENS))


def content(spec: PartSpec, salt: str = "") -> bytes:
    """Bytes of a part, the same for the same name and salt."""
    return blake3(f"{spec.name}{salt}".encode()).digest(length=spec.nbytes)


class Store:
    """A catalog with one filled session, faulty blobs, and the store over both."""

    def __init__(self) -> None:
        self.catalog = MemoryCatalog()
        self.faulty_catalog, port = FaultyCatalog.over(self.catalog)
        self.blobs = FaultyBlobs(MemoryBlobs())
        self.port: BlobStore = self.blobs
        self.checkpoints = CheckpointStore(port, self.blobs)

    async def fill(self) -> "Store":
        await self.catalog.open(MARKER)
        await owned(self.catalog, "s")
        await self.catalog.append(AppendTokens(name("s"), 1, TOKENS))
        return self

    async def save(
        self, checkpoint: str = "c1", position: int = 50, epoch: int = 1, salt: str = "", **fields: object
    ) -> SavedCheckpoint:
        grid = position // 16 * 16
        values: dict[str, object] = {
            "session": name("s"),
            "epoch": epoch,
            "checkpoint": checkpoint,
            "position": position,
            "grid_position": grid,
            "chain_hash": POINTS[grid],
            "numerics_ids": ["n", "older"],
            "model_digest": MARKER.model_digest,
            "tokenizer_digest": MARKER.tokenizer_digest,
            "layout": "tiny/1",
            "parts": [(spec, content(spec, salt)) for spec in SPECS],
            **fields,
        }
        return await self.checkpoints.save(**values)  # type: ignore[arg-type]

    async def load(self, manifest: bytes, expected: Sequence[PartSpec] = SPECS) -> list[tuple[PartSpec, bytes]]:
        return [(spec, bytes(raw)) async for spec, raw in self.checkpoints.load(manifest, expected, IDENTITY)]

    async def findings(self) -> list[Finding]:
        return [finding async for finding in check(self.catalog, self.port)]


@pytest.fixture
async def store() -> Store:
    return await Store().fill()


async def test_a_state_comes_back_part_by_part_in_the_order_asked_for(store: Store) -> None:
    saved = await store.save()
    row, manifest = await store.catalog.get_checkpoint(name("s"), "c1")
    assert (row, manifest) == (saved.row, saved.manifest)
    assert (row.grid_position, row.numerics_id, row.automatic) == (48, "n", False)
    backwards = SPECS[::-1]
    assert await store.load(manifest, backwards) == [(spec, content(spec)) for spec in backwards]
    found = unseal(manifest)
    assert (found.position, found.chain_hash, found.numerics_ids) == (48, POINTS[48], ("n", "older"))
    assert (found.identity, found.raw_bytes) == (IDENTITY, sum(spec.nbytes for spec in SPECS))
    assert [part.digest for part in saved.parts] == [blake3(content(spec)).hexdigest() for spec in SPECS]
    assert await store.findings() == []


async def test_a_part_may_be_named_by_the_digest_that_an_earlier_checkpoint_has(store: Store) -> None:
    first = await store.save("c1", 50)
    page = InStore(first.parts[2].digest)
    parts = [*((spec, content(spec, "later")) for spec in SPECS[:2]), (SPECS[2], page)]
    second = await store.save("c2", 34, parts=parts)
    assert second.parts[2] == SavedPart(SPECS[2], page.digest, shared=True, frame_bytes=0)
    assert second.bytes_shared == SPECS[2].nbytes
    loaded = await store.load(second.manifest)
    assert loaded == [*((spec, content(spec, "later")) for spec in SPECS[:2]), (SPECS[2], content(SPECS[2]))]
    assert await store.findings() == []


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("how", ["gone", "damaged"])
async def test_a_named_part_that_the_store_lacks_refuses_the_checkpoint(store: Store, compress: bool, how: str) -> None:
    store.checkpoints = CheckpointStore(store.catalog, store.blobs, compress=compress)
    first = await store.save("c1", 50)
    page = InStore(first.parts[2].digest)
    if how == "gone":
        await store.port.delete([page.digest])
    else:
        await store.port.replace(page.digest, b"no frame")
        assert [part.problem is None async for part in store.checkpoints.verify(first.manifest)] == [True, True, False]
    parts = [*((spec, content(spec)) for spec in SPECS[:2]), (SPECS[2], page)]
    with pytest.raises(BlobMissingError, match=page.digest):
        await store.save("c2", 50, parts=parts)
    assert [row.checkpoint for row in await store.catalog.list_checkpoints(name("s"))] == ["c1"]
    await store.save("c2", 50)
    assert await store.findings() == [], "with its bytes it is stored again"


@pytest.mark.parametrize("lost", range(3))
async def test_a_save_that_waits_for_a_collector_looks_for_all_of_its_blobs_again(store: Store, lost: int) -> None:
    """One blob is being collected; while the save waits for that, another is condemned, deleted and absolved."""
    digests = [blake3(content(spec)).hexdigest() for spec in SPECS]

    async def rest(_: float) -> None:
        await store.port.delete([digests[lost]])

    store.checkpoints = CheckpointStore(cast(Catalog, store.faulty_catalog), store.blobs, rest)
    store.faulty_catalog.before["put_checkpoint"] = BlobsCondemnedError([digests[0]])
    saved = await store.save()
    assert [part.digest for part in saved.parts] == digests
    assert await store.load(saved.manifest) == [(spec, content(spec)) for spec in SPECS]
    assert await store.findings() == []


async def test_equal_parts_are_stored_once(store: Store) -> None:
    first = await store.save("c1", 50)
    assert first.bytes_stored > sum(spec.nbytes for spec in SPECS)
    assert (first.bytes_shared, [part.shared for part in first.parts]) == (0, [False] * 3)
    parts = [(spec, content(spec, "new" if spec is SPECS[0] else "")) for spec in SPECS]
    second = await store.save("c2", 20, parts=parts)
    assert [part.shared for part in second.parts] == [False, True, True]
    assert second.bytes_shared == SPECS[1].nbytes + SPECS[2].nbytes
    assert len([digest async for digest in store.port.digests()]) == 4


async def test_an_empty_state_is_a_checkpoint_too(store: Store) -> None:
    saved = await store.save("c0", 3, parts=[])
    assert await store.load(saved.manifest, ()) == []


async def test_a_memoryview_of_a_tensor_is_saved_as_its_bytes(store: Store) -> None:
    data = [memoryview(content(spec)).cast("B") for spec in SPECS]
    floats = data[0].cast("f")
    saved = await store.save(parts=[(SPECS[0], floats), (SPECS[1], data[1]), (SPECS[2], data[2])])
    assert await store.load(saved.manifest) == [(spec, content(spec)) for spec in SPECS]


async def test_a_part_of_the_wrong_size_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="its spec needs"):
        await store.save(parts=[(SPECS[0], b"short")])
    with pytest.raises(ValueError, match="numerics id"):
        await store.save(numerics_ids=[])


async def test_a_save_under_a_stale_epoch_makes_no_checkpoint(store: Store) -> None:
    await store.catalog.acquire(name("s"), "node-b", 1)
    with pytest.raises(StaleEpochError):
        await store.save()
    assert await store.catalog.scan_manifests(0, 9) == []
    assert {finding.severity for finding in await store.findings()} == {Severity.WARNING}


async def test_a_full_disk_amid_a_save_makes_no_checkpoint_and_a_later_try_is_complete(store: Store) -> None:
    store.blobs.errors["put"] = StoreFullError("blobs", "no room")
    with pytest.raises(StoreFullError):
        await store.save()
    assert await store.catalog.scan_manifests(0, 9) == []
    store.blobs.errors.clear()
    saved = await store.save()
    assert len(await store.load(saved.manifest)) == 3
    assert await store.findings() == []


async def test_a_lost_answer_is_found_again_by_the_request_id(store: Store) -> None:
    store.faulty_catalog.after["put_checkpoint"] = StoreUnavailableError("catalog", "the answer was lost")
    with pytest.raises(StoreUnavailableError):
        await store.save(request=request("r"))
    again = await store.save(request=request("r"))
    assert [row.checkpoint for row in await store.catalog.list_checkpoints(name("s"))] == ["c1"]
    assert again.row.checkpoint == "c1"


@pytest.mark.parametrize("damage", ["flip", "truncate", "swap", "empty", "pickle"])
async def test_a_damaged_blob_is_never_loaded_and_the_next_save_heals_it(store: Store, damage: str) -> None:
    saved = await store.save()
    digest, other = saved.parts[1].digest, saved.parts[0].digest
    swapped = await store.port.get(other)
    store.blobs.damage[digest] = {
        "flip": lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]),
        "truncate": lambda frame: frame[:-1],
        "swap": lambda frame: swapped,
        "empty": lambda frame: b"",
        "pickle": lambda frame: b"\x80\x04cposix\nsystem\n(S'exit 1'\ntR.",
    }[damage]
    with pytest.raises(BlobDamagedError) as raised:
        await store.load(saved.manifest)
    assert raised.value.digest == digest
    results = [result async for result in store.checkpoints.verify(saved.manifest)]
    assert [result.problem is None for result in results] == [True, False, True]
    assert [(f.kind, f.severity) for f in await store.findings()] == [("BLOB_DAMAGED", Severity.ERROR)]
    healed = await store.save("c2")
    assert [part.shared for part in healed.parts] == [True, False, True]
    assert len(await store.load(saved.manifest)) == 3
    assert await store.findings() == []


async def test_a_damaged_manifest_is_healed_by_the_next_save_and_a_whole_one_kept(store: Store) -> None:
    saved = await store.save()
    tables = store.catalog._tables
    ((key, row),) = tables.manifests.items()
    tables.manifests[key] = replace(row, manifest=saved.manifest[:-1] + b"\0")
    assert [finding.kind for finding in await store.findings()][:1] == ["BAD_MANIFEST"]
    await store.save("c2")
    assert (await store.catalog.get_checkpoint(name("s"), "c1"))[1] == saved.manifest
    assert await store.findings() == []
    await store.save("c3", numerics_ids=["n", "another"])
    assert (await store.catalog.get_checkpoint(name("s"), "c3"))[1] == saved.manifest


async def test_a_missing_blob_is_named_and_the_next_save_brings_it_back(store: Store) -> None:
    saved = await store.save()
    await store.port.delete([saved.parts[2].digest])
    with pytest.raises(BlobMissingError) as raised:
        await store.load(saved.manifest)
    assert raised.value.digest == saved.parts[2].digest
    assert [finding.kind for finding in await store.findings()] == ["BLOB_MISSING"]
    await store.save("c2")
    assert len(await store.load(saved.manifest)) == 3


async def test_parts_before_a_missing_one_come_first_however_they_are_taken(store: Store) -> None:
    saved = await store.save()
    await store.port.delete([saved.parts[2].digest])
    one_by_one, together = list[PartSpec](), list[PartSpec]()
    with pytest.raises(BlobMissingError):
        async for spec, _ in store.checkpoints.load(saved.manifest, SPECS):
            one_by_one.append(spec)
    with pytest.raises(BlobMissingError):
        async for group in store.checkpoints.load_groups(saved.manifest, SPECS):
            together += [spec for spec, _ in group]
    assert one_by_one == together == list(SPECS[:2])


async def test_a_store_that_fails_is_not_a_damaged_blob(store: Store) -> None:
    saved = await store.save()
    store.blobs.errors["get"] = StoreUnavailableError("blobs", "EIO")
    with pytest.raises(StoreUnavailableError):
        await store.load(saved.manifest)


@pytest.mark.parametrize(
    ("expected", "what"),
    [
        (SPECS[:2], "state parts"),
        ((*SPECS, PartSpec("kda.001.state.0", "float32", (1,))), "state parts"),
        ((replace(SPECS[0], name="kda.000.state.1"), *SPECS[1:]), "state parts"),
        ((replace(SPECS[0], dtype="int32"), *SPECS[1:]), "part kda.000.state.0"),
        ((replace(SPECS[0], shape=(4, 2, 4)), *SPECS[1:]), "part kda.000.state.0"),
    ],
)
async def test_any_other_set_of_parts_is_refused(store: Store, expected: tuple[PartSpec, ...], what: str) -> None:
    saved = await store.save()
    with pytest.raises(StateIncompatibleError) as raised:
        await store.load(saved.manifest, expected)
    assert raised.value.what == what
    assert store.blobs.calls.get("get", 0) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("namespace", "t"), ("model_digest", bytes(32)), ("tokenizer_digest", bytes(32)), ("layout", "tiny/2")],
)
async def test_state_of_another_identity_is_refused(store: Store, field: str, value: object) -> None:
    saved = await store.save()
    other = replace(IDENTITY, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(StateIncompatibleError):
        async for _ in store.checkpoints.load(saved.manifest, SPECS, other):
            pass


async def test_every_flipped_bit_and_every_truncation_of_a_manifest_is_detected(store: Store) -> None:
    manifest = (await store.save()).manifest
    for bit in range(len(manifest) * 8):
        damaged = bytearray(manifest)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BlobDamagedError):
            unseal(bytes(damaged))
    for length in range(len(manifest)):
        with pytest.raises(BlobDamagedError):
            unseal(manifest[:length])


async def test_a_manifest_of_a_later_format_is_refused_and_not_misread(store: Store) -> None:
    manifest = (await store.save()).manifest
    for version in (0, 2):
        sealed = manifest_pb2.SealedManifest.FromString(manifest)
        inner = manifest_pb2.Manifest.FromString(sealed.manifest)
        inner.format_version = version
        sealed.manifest = inner.SerializeToString()
        sealed.self_hash = blake3(sealed.manifest).digest()
        with pytest.raises(StateIncompatibleError):
            unseal(sealed.SerializeToString())


async def test_a_sealed_manifest_that_lies_about_its_parts_is_refused(store: Store) -> None:
    found = unseal((await store.save()).manifest)
    twice = replace(found, parts=(*found.parts, found.parts[0]))
    with pytest.raises(StateIncompatibleError, match="twice"):
        match_parts(unseal(seal(twice)), SPECS)
    with pytest.raises(BlobDamagedError):
        unseal(seal(replace(found, position=17)))
    with pytest.raises(BlobDamagedError):
        unseal(seal(replace(found, chain_hash=b"short")))


async def test_leaving_a_load_early_leaves_nothing_running(store: Store) -> None:
    saved = await store.save()
    parts = store.checkpoints.load(saved.manifest, SPECS)
    assert (await anext(parts))[0] == SPECS[0]
    await parts.aclose()
    assert len(asyncio.all_tasks()) == 1


async def test_check_names_what_no_manifest_needs_and_what_no_chain_leads_to(store: Store) -> None:
    await store.save()
    noise = os.urandom(10)
    await store.port.put(blake3(noise).hexdigest(), b"frame")
    await store.catalog.rewind(name("s"), 1, 10)
    found = {(finding.kind, finding.severity) for finding in await store.findings()}
    assert found == {("ORPHAN_BLOB", Severity.WARNING), ("UNREACHABLE_MANIFEST", Severity.WARNING)}


async def test_check_finds_manifests_that_do_not_fit_their_key(store: Store) -> None:
    saved = await store.save()
    tables = store.catalog._tables
    ((key, row),) = tables.manifests.items()
    for wrong in (
        b"",
        saved.manifest[:-1],
        seal(replace(unseal(saved.manifest), position=32)),
        seal(replace(unseal(saved.manifest), numerics_ids=("other",))),
        seal(replace(unseal(saved.manifest), identity=replace(IDENTITY, model_digest=bytes(32)))),
    ):
        tables.manifests[key] = replace(row, manifest=wrong)
        assert "BAD_MANIFEST" in {finding.kind for finding in await store.findings()}
