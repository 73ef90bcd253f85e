"""Manifests: what a checkpoint consists of, sealed with a hash over its own bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from blake3 import blake3
from google.protobuf.message import DecodeError

from forkpoint.errors import BlobDamagedError, StateIncompatibleError
from forkpoint.limits import DIGEST_BYTES, TILE_TOKENS
from forkpoint.parts import ITEM_BYTES, PartSpec
from forkpoint.proto.forkpoint.store.v1 import manifest_pb2
from forkpoint.statestore.records import ManifestRow

FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class StateIdentity:
    """What state bytes belong to. Bytes of one identity mean nothing under another."""

    namespace: str
    model_digest: bytes
    tokenizer_digest: bytes
    layout: str
    """Tag of the model's state layout."""


@dataclass(frozen=True, slots=True)
class ManifestPart:
    """A part and the blob that holds it."""

    spec: PartSpec
    digest: str
    """BLAKE3 of the raw bytes, hex."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint's content."""

    identity: StateIdentity
    numerics_ids: tuple[str, ...]
    """The writer's own first."""
    position: int
    """On the grid."""
    chain_hash: bytes
    """h(position)."""
    parts: tuple[ManifestPart, ...]

    @property
    def raw_bytes(self) -> int:
        """Size of all parts."""
        return sum(part.spec.nbytes for part in self.parts)


def seal(manifest: Manifest) -> bytes:
    """The manifest's bytes as the catalog stores them."""
    identity = manifest.identity
    message = manifest_pb2.Manifest(
        format_version=FORMAT_VERSION,
        namespace=identity.namespace,
        model_digest=identity.model_digest,
        tokenizer_digest=identity.tokenizer_digest,
        numerics_ids=manifest.numerics_ids,
        layout=identity.layout,
        position=manifest.position,
        chain_hash=manifest.chain_hash,
        parts=[
            manifest_pb2.Part(
                name=part.spec.name,
                dtype=part.spec.dtype,
                shape=part.spec.shape,
                blake3=bytes.fromhex(part.digest),
                raw_bytes=part.spec.nbytes,
            )
            for part in manifest.parts
        ],
    )
    inner = message.SerializeToString(deterministic=True)
    sealed = manifest_pb2.SealedManifest(manifest=inner, self_hash=blake3(inner).digest())
    return sealed.SerializeToString(deterministic=True)


def unseal(data: bytes, where: str = "manifest") -> Manifest:
    """Parse and verify. Raises BlobDamagedError (naming `where`) when bytes are damaged, StateIncompatibleError when
    they are whole and of another format version."""
    message = _open(data, where)
    if len(message.chain_hash) != DIGEST_BYTES or message.position < 0 or message.position % TILE_TOKENS:
        raise BlobDamagedError(where, "no grid position or chain hash")
    identity = StateIdentity(message.namespace, message.model_digest, message.tokenizer_digest, message.layout)
    parts = tuple(_part(part, where) for part in message.parts)
    return Manifest(identity, tuple(message.numerics_ids), message.position, message.chain_hash, parts)


def _open(data: bytes, where: str) -> manifest_pb2.Manifest:
    try:
        sealed = manifest_pb2.SealedManifest.FromString(data)
        if blake3(sealed.manifest).digest() != sealed.self_hash:
            raise BlobDamagedError(where, "the manifest's hash over itself differs")
        message = manifest_pb2.Manifest.FromString(sealed.manifest)
    except DecodeError as error:
        raise BlobDamagedError(where, "not a manifest") from error
    if message.format_version != FORMAT_VERSION:
        raise StateIncompatibleError("manifest format", str(message.format_version), str(FORMAT_VERSION))
    return message


def digests_in(data: bytes, where: str = "manifest") -> list[bytes]:
    """The digests of all blobs that a sealed manifest names, 32 bytes each. Raises what unseal raises."""
    return [part.blake3 for part in _open(data, where).parts]


def _part(part: manifest_pb2.Part, where: str) -> ManifestPart:
    if part.dtype not in ITEM_BYTES:
        raise StateIncompatibleError(f"dtype of part {part.name}", part.dtype, " or ".join(sorted(ITEM_BYTES)))
    if len(part.blake3) != DIGEST_BYTES or any(extent < 0 for extent in part.shape):
        raise BlobDamagedError(where, f"part {part.name} has no digest or a negative shape")
    spec = PartSpec(part.name, part.dtype, tuple(part.shape))
    if spec.nbytes != part.raw_bytes:
        raise BlobDamagedError(where, f"part {part.name} has {part.raw_bytes} bytes, its shape needs {spec.nbytes}")
    return ManifestPart(spec, part.blake3.hex())


def check_identity(manifest: Manifest, ours: StateIdentity) -> None:
    """Raises StateIncompatibleError naming what differs."""
    theirs = manifest.identity
    for what, stored, mine in (
        ("namespace", theirs.namespace, ours.namespace),
        ("model digest", theirs.model_digest.hex(), ours.model_digest.hex()),
        ("tokenizer digest", theirs.tokenizer_digest.hex(), ours.tokenizer_digest.hex()),
        ("state layout", theirs.layout, ours.layout),
    ):
        if stored != mine:
            raise StateIncompatibleError(what, stored, mine)


def match_parts(manifest: Manifest, expected: Sequence[PartSpec]) -> list[ManifestPart]:
    """The manifest's parts in the order of `expected`. Raises StateIncompatibleError unless names, dtypes and shapes
    are exactly those: an unknown part may be state that we would drop, a missing one state that we would invent."""
    stored = {part.spec.name: part for part in manifest.parts}
    if len(stored) != len(manifest.parts):
        raise StateIncompatibleError("state parts", "a part twice", "each part once")
    missing = [spec.name for spec in expected if spec.name not in stored]
    unknown = sorted(stored.keys() - {spec.name for spec in expected})
    if missing or unknown:
        raise StateIncompatibleError("state parts", f"none of {missing[:3]}, more: {unknown[:3]}", "exactly its layout")
    for spec in expected:
        if stored[spec.name].spec != spec:
            theirs = stored[spec.name].spec
            raise StateIncompatibleError(
                f"part {spec.name}", f"{theirs.dtype}{list(theirs.shape)}", f"{spec.dtype}{list(spec.shape)}"
            )
    return [stored[spec.name] for spec in expected]


def manifest_of(row: ManifestRow) -> Manifest:
    """The manifest in a catalog's row. Raises what unseal raises; BlobDamagedError when it is of another state."""
    manifest = unseal(row.manifest)
    if (manifest.position, manifest.chain_hash) != (row.grid_position, row.chain_hash):
        raise BlobDamagedError(
            row.chain_hash.hex(), f"the manifest under it is of another state at {manifest.position}"
        )
    return manifest
