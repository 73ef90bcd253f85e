"""What the session layer needs from outside, beside the store's and the engine's ports."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from forkpoint.chat import Chat, PromptIds
from forkpoint.errors import UnavailableError
from forkpoint.ids import SessionName
from forkpoint.statestore.records import Kind, NodeRow


class TextCodec(Protocol):
    """Text to token ids and back. Control ids come only from the model's chat form, never from text."""

    def encode_text(self, text: bytes) -> list[int]:
        """Token ids of UTF-8 text, tokenised alone. Raises NotUtf8Error."""
        ...

    def render_chat(self, chat: Chat) -> PromptIds:
        """Token ids of a chat. Raises NotUtf8Error, InvalidFieldError (what the form does not have: an unknown role,
        thinking)."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The text bytes of one token; b"" for control tokens that text is not read by."""
        ...


@dataclass(frozen=True, slots=True)
class FollowAsk:
    """What an owner asks of a follower. `migration` "": a hot standby."""

    name: SessionName
    epoch: int
    owner: str
    """Incarnation that asks."""
    owner_address: str
    migration: str = ""


@dataclass(frozen=True, slots=True)
class FollowReport:
    """How far a follower is, in tokens: what its model consumed, and what it has read of the log."""

    restored_tokens: int
    restored_bytes: int
    applied: int
    known: int


@dataclass(frozen=True, slots=True)
class CutOverAsk:
    """The owner's last word: its log ends at `head`, and will not grow under `epoch`."""

    name: SessionName
    epoch: int
    head: int
    head_hash: bytes
    migration: str


@dataclass(frozen=True, slots=True)
class TailedTokens:
    """Committed tokens from `start`, as their owner tells them."""

    start: int
    token_ids: tuple[int, ...]
    kinds: tuple[Kind, ...]
    logprobs: tuple[float | None, ...]


class Peers(Protocol):
    """Calls to other nodes, over one channel each. All raise what the other node raises, as far as its status tells,
    and UnavailableError when it can't be reached. Cancelling a call cancels it there."""

    def follow(self, node: NodeRow, ask: FollowAsk) -> AsyncGenerator[FollowReport, None]:
        """Let `node` follow the session until the iterator is closed. It ends when the node has become its owner."""
        ...

    async def cut_over(self, node: NodeRow, ask: CutOverAsk, timeout_seconds: float) -> int:
        """Let `node`, which follows the session, own it; returns its epoch. UnavailableError when there is no answer in
        time: then nobody knows whether it does."""
        ...

    def tail(self, address: str, name: SessionName, start: int) -> AsyncGenerator[TailedTokens, None]:
        """Committed tokens from `start`, for as long as the node at `address` owns the session."""
        ...


class NoPeers:
    """Implements Peers for a node that is alone."""

    async def follow(self, node: NodeRow, ask: FollowAsk) -> AsyncGenerator[FollowReport, None]:
        for _ in ():
            yield FollowReport(0, 0, 0, 0)
        raise UnavailableError(f"{node.node} can't be reached from here")

    async def cut_over(self, node: NodeRow, ask: CutOverAsk, timeout_seconds: float) -> int:
        raise UnavailableError(f"{node.node} can't be reached from here")

    async def tail(self, address: str, name: SessionName, start: int) -> AsyncGenerator[TailedTokens, None]:
        for _ in ():
            yield TailedTokens(start, (), (), ())
        raise UnavailableError(f"{address} can't be reached from here")
