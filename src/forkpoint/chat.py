"""A chat as a caller gives it, before a model's chat form makes token ids of it."""

from dataclasses import dataclass

from forkpoint.errors import InvalidFieldError


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One turn. `text`: UTF-8. `name`: who speaks, or which tool answers; "": nobody in particular."""

    role: str
    text: bytes
    name: str = ""


@dataclass(frozen=True, slots=True)
class Chat:
    """Turns, and how the answer is asked for."""

    turns: tuple[ChatTurn, ...]
    add_generation_prompt: bool = False
    """End with what opens the assistant's turn."""
    thinking: bool | None = None
    """Whether the assistant thinks before it answers; None: as the model's chat form has it."""
    thinking_effort: str = ""
    """How much it thinks; "": as the model's chat form has it."""


@dataclass(frozen=True, slots=True)
class PromptIds:
    """Token ids of an input. What they are may depend on whether anything stands before them in the log."""

    ids: tuple[int, ...]
    opening: tuple[int, ...] = ()
    """Stands before `ids` where they begin a log."""
    only_first: str = ""
    """Field of what may only begin a log; "": there is no such thing."""

    def at(self, position: int) -> tuple[int, ...]:
        """The ids when the log has `position` tokens. Raises InvalidFieldError."""
        if position == 0:
            return self.opening + self.ids
        if self.only_first:
            raise InvalidFieldError(self.only_first, f"comes before everything else, and {position} tokens are there")
        return self.ids
