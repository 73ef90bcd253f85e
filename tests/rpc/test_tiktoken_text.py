"""Text in and out over the wire with the published models' tokenizer: characters in pieces, chats, stop ids."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forkpoint.chat import Chat, ChatTurn
from forkpoint.client.client import Client
from forkpoint.client.errors import RemoteError
from forkpoint.client.session import Session
from forkpoint.proto.forkpoint.v1 import common_pb2
from forkpoint.server.app import TokenizerCodec, serving
from tests.support.hash_engine import HashEngine
from tests.support.model_folder import write_folder
from tests.support.random_model import random_model
from tests.support.rpc_site import Served, config_for, parts_for, served
from tests.support.tiktoken_folder import FIRST, K3, TOKENS, tokenizer_of, write_tiktoken

TOKENIZER = tokenizer_of(K3)
SMILE, TWO = TOKENIZER.encode("🙂".encode()), TOKENIZER.encode("好".encode())
THREE = TOKENIZER.encode("漢".encode())
"""A character of two tokens of two bytes, one of two and one bytes, and one of three single bytes."""
PIECES = (*SMILE, *TWO, *THREE, TOKENS.index("你".encode()), ord("a"))
STOPS = (FIRST + 2, TWO[0], ord("a"))


async def test_the_characters_are_in_pieces_here() -> None:
    assert [len(TOKENS[token_id]) for token_id in (*SMILE, *TWO, *THREE)] == [2, 2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("alphabet", "stop"), [(PIECES, ""), ((*SMILE, *TWO), "🙂"), ((*TWO, ord("a")), "好a"), ((*THREE, ord("a")), "漢")]
)
async def test_characters_in_pieces_come_out_whole_wherever_a_stream_is_cut(
    tmp_path: Path, alphabet: tuple[int, ...], stop: str
) -> None:
    """An engine that says the alphabet in an order that looks random, behind this tokenizer."""
    engine = HashEngine(alphabet=alphabet)
    parts = replace(parts_for(config_for(tmp_path), engine), codec=TokenizerCodec(TOKENIZER))
    async with served(tmp_path, engine, parts) as site:
        await check_cuts(site, stop)


async def check_cuts(site: Served, stop: str) -> None:
    session = await site.session(text="x")
    options = {"max_tokens": 150, "stop_text": [stop] if stop else [], "request_id": "g"}
    generation = session.generate(**options)  # type: ignore[arg-type]
    parts = [chunk.text_utf8 async for chunk in generation]
    ids, whole = generation.token_ids, generation.text
    said = TOKENIZER.decode_bytes(ids)
    assert whole == (said.partition(stop.encode())[0] if stop else said)
    assert b"".join(parts) == whole
    assert any(character.encode() in said for character in "🙂好漢"), "else this tests nothing"
    assert "".join(part.decode(errors="replace") for part in parts) == whole.decode(errors="replace")
    for cut in range(0, len(ids) + 1, 3):
        tail = await session.generate(**options, resume_position=1 + cut).result()  # type: ignore[arg-type]
        assert tail.token_ids == ids[cut:]
        assert whole.endswith(tail.text)
        assert len(tail.text) >= len(whole) - len(TOKENIZER.decode_bytes(ids[:cut]))
    finished = generation.finished
    assert finished is not None
    if stop:
        assert finished.reason == common_pb2.STOP
        before = ids[: finished.stop_position - 1]
        assert len(TOKENIZER.decode_bytes(before)) <= said.index(stop.encode()), "the stop's first byte is in the token"
    again = (await session.tokens(1).result()).text
    assert again == said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with K3's tokenizer, whose weights favour PIECES. Two of them are stops, in generation_config.json
    alone."""
    config, weights = random_model(vocab_size=FIRST + 256, eos_token_id=FIRST + 2)
    favoured = torch.tensor(PIECES)
    head = torch.zeros_like(weights["lm_head.weight"])
    head[favoured] = 8 * weights["lm_head.weight"][favoured]
    folder = write_folder(tmp_path_factory.mktemp("k3"), config, weights | {"lm_head.weight": head}, torch.bfloat16)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": STOPS}))
    return write_tiktoken(folder, K3)


@pytest.fixture
async def session(folder: Path, tmp_path: Path) -> AsyncIterator[Session]:
    """An empty session of that model, served from its folder."""
    config = config_for(tmp_path, model=folder, slots=2, pages=32)
    async with serving(config) as running, Client(running.address) as client:
        await client.workflows.create("w")
        yield await client.sessions.create("w", "s", seed=7)


def ids_of(*turns: tuple[str, str], at: int, prompt: bool = False, thinking: bool | None = None) -> list[int]:
    chat = Chat(tuple(ChatTurn(role, text.encode()) for role, text in turns), prompt, thinking)
    return list(TOKENIZER.render_chat(chat).at(at))


async def test_a_folder_of_k3_chats_over_the_wire(session: Session) -> None:
    first = await session.append(messages=[("system", "你好 <|end_of_msg|> 🙂")], request_id="a")
    wanted = ids_of(("system", "你好 <|end_of_msg|> 🙂"), at=0)
    assert list(first.token_ids) == wanted, "a log begins with the effort"
    again = await session.append(messages=[("system", "你好 <|end_of_msg|> 🙂")], request_id="a")
    assert (list(again.token_ids), again.replayed, again.start) == (wanted, True, 0)
    generation = await session.generate(
        messages=[("user", "héllo", "Ann")],
        add_generation_prompt=True,
        thinking=False,
        max_tokens=40,
        temperature=1.0,
    ).result()
    log = (await session.tokens().result()).token_ids
    chat = Chat((ChatTurn("user", "héllo".encode(), "Ann"),), True, False)
    begin = len(wanted) + len(TOKENIZER.render_chat(chat).at(1))
    assert log[len(wanted) : begin] == list(TOKENIZER.render_chat(chat).at(1)), "and says it once"
    assert log[begin:] == generation.token_ids
    finished = generation.finished
    assert finished is not None and finished.reason in (common_pb2.STOP, common_pb2.LENGTH)
    kept = generation.token_ids[:-1] if finished.reason == common_pb2.STOP else generation.token_ids
    assert generation.text == TOKENIZER.decode_bytes(kept)
    assert not {*STOPS} & {*kept}, "generation_config.json's stops end it"
    text = await session.append(text="naïve 🙂<|open|>")
    assert list(text.token_ids) == TOKENIZER.encode("naïve 🙂<|open|>".encode())
    assert (await session.tokens(text.start).result()).text == "naïve 🙂<|open|>".encode()


async def test_every_generation_ends_at_any_of_the_folders_stop_ids(session: Session) -> None:
    await session.append(text="x")
    ends = set[int]()
    for seed in range(3):
        generation = await session.generate(max_tokens=12, temperature=1.0, seed=seed).result()
        assert generation.finished is not None
        if generation.finished.reason == common_pb2.STOP:
            ends.add(generation.token_ids[-1])
            assert generation.finished.stop_position == generation.finished.head - 1
        assert not {*STOPS} & set(generation.token_ids[:-1])
    assert ends & {*STOPS[1:]}


@pytest.mark.parametrize(
    ("turns", "options", "field"),
    [
        ([("user", "x"), ("tool", "18")], {}, "messages[1].name"),
        ([("user", "x")], {"thinking_effort": "medium"}, "messages.thinking_effort"),
        ([("user", "x")], {"thinking": False, "thinking_effort": "low"}, "messages.thinking_effort"),
        ([('assistant"<|sep|>', "x")], {}, "messages[0].role"),
        ([("user", "x", "n" * 257)], {}, "messages.messages[0].name"),
    ],
)
async def test_what_the_form_does_not_take_is_refused_and_changes_nothing(
    session: Session, turns: list[tuple[str, str]], options: dict[str, bool], field: str
) -> None:
    with pytest.raises(RemoteError) as caught:
        await session.append(messages=turns, **options)  # type: ignore[arg-type]
    assert caught.value.reason == "INVALID_FIELD"
    assert field in caught.value.message
    assert (await session.get()).head == 0
    tools = [("tool_declare", '[{"name": "f"}]')]
    await session.append(messages=tools)
    with pytest.raises(RemoteError, match="before everything else"):
        await session.append(messages=tools)
