"""What a model's answer is made of: text, reasoning, calls of tools."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a tool call; its arguments follow in pieces."""

    index: int
    """Which call of this answer."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, as the model wrote it."""

    index: int
    text: str


Part = Text | Reasoning | CallStart | CallArguments


@dataclass(frozen=True, slots=True)
class Call:
    """One whole tool call."""

    id: str
    name: str
    arguments: str
    """A JSON object, if the model wrote a valid one and was not cut short."""


@dataclass(frozen=True, slots=True)
class Message:
    """One whole answer."""

    text: str
    reasoning: str
    calls: tuple[Call, ...]
    in_call: bool = False
    """Whether it ends inside the last call."""


def assemble(parts: Iterable[Part], *, in_call: bool = False) -> Message:
    """Put an answer together from its parts."""
    texts, thoughts = [], []
    starts: list[CallStart] = []
    arguments: dict[int, list[str]] = {}
    for part in parts:
        match part:
            case Text(text):
                texts.append(text)
            case Reasoning(text):
                thoughts.append(text)
            case CallStart():
                starts.append(part)
                arguments[part.index] = []
            case CallArguments(index, text):
                arguments[index].append(text)
    calls = tuple(Call(start.id, start.name, "".join(arguments[start.index])) for start in starts)
    return Message("".join(texts), "".join(thoughts), calls, in_call)
