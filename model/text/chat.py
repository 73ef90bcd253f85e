"""Chat forms: turns of a chat to token ids. Control ids come from the form alone, never from a text, name or tag."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final, Protocol

from forkpoint.chat import Chat, ChatTurn, PromptIds
from forkpoint.errors import InvalidFieldError

Encode = Callable[[bytes, str], list[int]]
"""Text and the field that it came in, to ids that are never control ids. Raises NotUtf8Error."""

ROLES: Final = ("system", "user", "assistant", "tool")
"""Roles of chat turns. A closed list: control tokens such as `<|end|>` are no roles."""
TOOL_DECLARE: Final = "tool_declare"
"""A role of the published models: the turn's text is a JSON list of tools. It comes before everything else."""
EFFORTS: Final = ("low", "high", "max")
EFFORT_DEFAULT: Final = "max"
EFFORT_TEXT: Final = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
"""K3 was trained on these words; others would be another prompt. It names `medium`, which it does not take."""
TOOLS_TEXT: Final = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
"""As EFFORT_TEXT."""


class ChatForm(Protocol):
    """A model's way to write a chat down."""

    markers: ClassVar[tuple[str, ...]]
    """Control tokens that a tokenizer with this form has."""
    wording: ClassVar[tuple[str, ...]]
    """Name of the form and its own words: they change ids, so they are in the tokenizer's digest."""

    @property
    def turn_end_id(self) -> int:
        """Ends every turn, a generated one as well."""
        ...

    def render(self, chat: Chat) -> PromptIds:
        """Ids of a chat. Raises InvalidFieldError, NotUtf8Error."""
        ...


class ImForm:
    """Kimi Linear's: `<|im_ROLE|>` NAME `<|im_middle|>` TEXT `<|im_end|>`, with nothing between turns or before them.

    NAME is the turn's name, else its role. A role other than user and assistant has the system's marker. The text of a
    tool's answer goes in as it is: what the published template puts around it is not known here.
    """

    markers: ClassVar[tuple[str, ...]] = (
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_system|>",
        "<|im_middle|>",
        "<|im_end|>",
    )
    wording: ClassVar[tuple[str, ...]] = ("im",)

    def __init__(self, ids: Mapping[str, int], encode: Encode) -> None:
        """`ids`: of the control tokens, by name; all of `markers`."""
        self._user, self._assistant, self._system, self._middle, self._end = (ids[name] for name in self.markers)
        self._encode = encode

    @property
    def turn_end_id(self) -> int:
        return self._end

    def render(self, chat: Chat) -> PromptIds:
        refuse_thinking(chat)
        ids: list[int] = []
        for field, turn in checked_turns(chat):
            text = declared_tools(turn, field) if turn.role == TOOL_DECLARE else turn.text
            ids.append({"user": self._user, "assistant": self._assistant}.get(turn.role, self._system))
            ids += self._encode((turn.name or turn.role).encode(), f"{field}.name")
            ids.append(self._middle)
            ids += self._encode(text, f"{field}.text")
            ids.append(self._end)
        if chat.add_generation_prompt:
            ids += [self._assistant, *self._encode(b"assistant", "messages"), self._middle]
        return PromptIds(tuple(ids), only_first=declaration(chat))


class XtmlForm:
    """K3's: messages of nested elements, `<|open|>` TAG ATTRIBUTES `<|sep|>` … `<|close|>` TAG `<|sep|>`, each message
    ended by `<|end_of_msg|>`.

    Only these four are control ids. Every tag, attribute's key, quote, value and text is encoded alone, so that none
    joins its neighbour; an attribute's value has `&` and `"` escaped. At the start of a log stand the tools, then how
    much to think. The assistant's message holds `think` (unless thinking is off) and `response`.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    wording: ClassVar[tuple[str, ...]] = ("xtml", EFFORT_TEXT, TOOLS_TEXT, EFFORT_DEFAULT)

    def __init__(self, ids: Mapping[str, int], encode: Encode) -> None:
        """`ids`: of the control tokens, by name; all of `markers`."""
        self._open, self._close, self._sep, self._end = (ids[name] for name in self.markers)
        self._encode = encode

    @property
    def turn_end_id(self) -> int:
        return self._end

    def render(self, chat: Chat) -> PromptIds:
        thinking, effort = chat.thinking is not False, self._effort(chat)
        tools: list[int] = []
        ids: list[int] = []
        answers = 0
        for field, turn in checked_turns(chat):
            if turn.role == TOOL_DECLARE:
                text = TOOLS_TEXT.format(declared_tools(turn, field).decode())
                tools = self._message({"role": "system", "type": "tool-declare"}, self._text(text))
                continue
            answers = {"tool": answers + 1, "assistant": 0}.get(turn.role, answers)
            ids += self._turn(turn, field, thinking, answers)
        if chat.add_generation_prompt:
            ids += self._tag(self._open, "message", {"role": "assistant"})
            ids += self._tag(self._open, "think" if thinking else "response")
        if chat.thinking_effort:
            return PromptIds((*tools, *effort, *ids), only_first=declaration(chat))
        return PromptIds(tuple(ids), (*tools, *effort), declaration(chat))

    def _effort(self, chat: Chat) -> list[int]:
        """The message about how much to think. Without a wish it has the default, and stands at a log's start only."""
        effort = chat.thinking_effort
        if effort and effort not in EFFORTS:
            raise InvalidFieldError("messages.thinking_effort", f"{effort!r} is none of {list(EFFORTS)}")
        if chat.thinking is False:
            if effort:
                raise InvalidFieldError("messages.thinking_effort", "goes with thinking, which is off")
            return []
        text = self._text(EFFORT_TEXT.format(effort or EFFORT_DEFAULT))
        return self._message({"role": "system", "type": "thinking-effort"}, text)

    def _turn(self, turn: ChatTurn, field: str, thinking: bool, answers: int) -> list[int]:
        """One turn; `answers`: how many tools have answered since the assistant spoke, this one included."""
        text = self._encode(turn.text, f"{field}.text")
        if turn.role == "tool":
            if not turn.name:
                raise InvalidFieldError(f"{field}.name", "is required: which tool answers")
            return self._message({"role": "tool", "tool": turn.name, "index": str(answers)}, text)
        if turn.role == "assistant":
            thought = self._element("think", []) if thinking else []
            text = thought + self._element("response", text)
        return self._message({"role": turn.role} | ({"name": turn.name} if turn.name else {}), text)

    def _message(self, attributes: Mapping[str, str], body: list[int]) -> list[int]:
        return [*self._element("message", body, attributes), self._end]

    def _element(self, tag: str, body: list[int], attributes: Mapping[str, str] | None = None) -> list[int]:
        return self._tag(self._open, tag, attributes or {}) + body + self._tag(self._close, tag)

    def _tag(self, marker: int, tag: str, attributes: Mapping[str, str] | None = None) -> list[int]:
        segments = [tag]
        for key, value in (attributes or {}).items():
            segments += [f" {key}", '="', value.replace("&", "&amp;").replace('"', "&quot;"), '"']
        return [marker, *(token_id for segment in segments for token_id in self._text(segment)), self._sep]

    def _text(self, text: str) -> list[int]:
        return self._encode(text.encode(), "messages")


def declaration(chat: Chat) -> str:
    """The field of a chat's declaration of tools, which is nowhere but at the start of a log; "": it has none."""
    return "messages[0].role" if chat.turns and chat.turns[0].role == TOOL_DECLARE else ""


def checked_turns(chat: Chat) -> Iterator[tuple[str, ChatTurn]]:
    """Each turn of the published models' forms, with the path of its field. Raises InvalidFieldError."""
    for index, turn in enumerate(chat.turns):
        field = f"messages[{index}]"
        if turn.role == TOOL_DECLARE:
            if index:
                raise InvalidFieldError(f"{field}.role", "tools are declared before everything else in a session")
            if turn.name:
                raise InvalidFieldError(f"{field}.name", "a declaration of tools has none")
        elif turn.role not in ROLES:
            known = [*ROLES, TOOL_DECLARE]
            raise InvalidFieldError(f"{field}.role", f"{turn.role!r} is no role of this model, expected one of {known}")
        yield field, turn


def refuse_thinking(chat: Chat) -> None:
    """For forms without it. Raises InvalidFieldError."""
    for field, value in (("thinking", chat.thinking), ("thinking_effort", chat.thinking_effort)):
        if value:
            raise InvalidFieldError(f"messages.{field}", "this model's chat form has no thinking")


def declared_tools(turn: ChatTurn, field: str) -> bytes:
    """A turn's list of tools as the published forms write it: compact, keys sorted. Raises InvalidFieldError."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    try:
        tools = json.loads(turn.text.decode(), parse_constant=refuse)
        text = json.dumps(tools, ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False)
        encoded = text.encode()
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError(f"{field}.text", f"is not JSON: {error}") from None
    if not isinstance(tools, list) or not tools:
        raise InvalidFieldError(f"{field}.text", "is not a JSON list of tools")
    return encoded
