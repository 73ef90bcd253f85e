"""What the services need to know of the node beside its sessions."""

from dataclasses import dataclass

from forkpoint.statestore.records import Durability


@dataclass(frozen=True, slots=True)
class Served:
    """Facts of the serving process that appear in answers or bound requests. Digests are 32 bytes each."""

    node: str
    namespace: str
    model_digest: bytes
    tokenizer_digest: bytes
    vocab_size: int
    durability: Durability
    checkpoint_every: int
