"""Reads one tool call, a JSON object with a name and arguments, as it comes.

The arguments are handed on as the model writes them, so the scanner knows just enough JSON to find
where they begin and end: strings, and how deep brackets are. The result does not depend on how the
text was cut into pieces.
"""

import re
from typing import Final

import orjson

from octavo.server.tools.parts import CallArguments, CallStart, Part

_SPACE: Final = " \t\r\n"
_NAME: Final = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
_ARGUMENT_KEYS: Final = ("arguments", "parameters")


class CallScanner:
    """One call; ``push`` it text until it ``is_over``.

    Attributes:
        is_over: nothing more belongs to the call.
        has_started: its name is known and was handed on.
        raw: what was read before it started: its text, if it turns out to be no call.
    """

    def __init__(self, index: int, call_id: str, names: frozenset[str] | None = None) -> None:
        """Start before the object's opening brace.

        Args:
            index: which call of the answer.
            call_id: its id.
            names: the only names that make an object a call; None: any name.
        """
        self._index = index
        self._id = call_id
        self._names = names
        self._expects = "open"
        self._key = ""
        self._value: list[str] = []
        self._quoted = self._escaped = False
        self._depth = 0
        self._held: list[str] = []
        self._has_arguments = False
        self._only_arguments = False
        self._refused = False
        self.raw = ""
        self.has_started = False
        self.is_over = False

    def begin_arguments(self, name: str) -> list[Part]:
        """Note the name, where it stood before the arguments; they follow without an object."""
        if not self._is_name(name):
            self.is_over = True
            return []
        self._expects, self._key, self._only_arguments = "value", "arguments", True
        return self._start(name)

    def push(self, text: str) -> tuple[list[Part], str]:
        """Read on; return what was found, and what comes after the call."""
        parts: list[Part] = []
        for position, char in enumerate(text):
            if self.is_over:
                return _joined(parts), text[position:]
            if not self.has_started:
                self.raw += char
            parts += self._read(char)
            if self._refused and self.has_started:
                return _joined(parts), text[position:]
        return _joined(parts), ""

    def _read(self, char: str) -> list[Part]:
        if self._expects == "value" and (self._value or char not in _SPACE):
            return self._read_value(char)
        if self._expects == "key" and (self._value or char == '"'):
            self._read_key(char)
        elif char in _SPACE:
            pass
        elif self._expects == "open" and char == "{":
            self._expects = "key"
        elif self._expects == "colon" and char == ":":
            self._expects = "value"
        elif self._expects == "comma" and char == ",":
            self._expects = "key"
        elif self._expects in ("comma", "key") and char == "}":
            return self._end()
        else:
            self.is_over = self._refused = True
        return []

    def _read_key(self, char: str) -> None:
        self._value.append(char)
        if self._closes_string(char):
            key = _string(self._take())
            self._key, self._expects = key or "", "colon"

    def _read_value(self, char: str) -> list[Part]:
        """Read a character of a value; a bare word ends before the one that follows it."""
        first = self._value[0] if self._value else char
        if first not in '"{[' and (char in ",}" or char in _SPACE):
            parts = self._end_value()
            return [*parts, *self._read(char)]
        streams = first == "{" and self._holds_arguments
        self._value.append(char)
        parts = self._add_arguments(char) if streams else []
        if first == '"':
            ended = self._closes_string(char)
        else:
            ended = first in "{[" and self._closes_brackets(char)
        return [*parts, *self._end_value()] if ended else parts

    def _closes_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._quoted = not self._quoted
            return not self._quoted
        return False

    def _closes_brackets(self, char: str) -> bool:
        if self._quoted or char == '"':
            self._closes_string(char)
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return self._depth == 0

    def _end_value(self) -> list[Part]:
        text = self._take()
        self._expects = "comma"
        if self._holds_arguments:
            self._has_arguments = True
            self.is_over = self._only_arguments
            return [] if text.startswith("{") else self._add_arguments(_as_object(text))
        if self._key == "name" and not self.has_started:
            name = _string(text)
            if name is None or not self._is_name(name):
                self.is_over = True
                return []
            return self._start(name)
        return []

    def _start(self, name: str) -> list[Part]:
        self.has_started = True
        held, self._held = self._held, []
        return [
            CallStart(self._index, self._id, name),
            *(CallArguments(self._index, text) for text in held),
        ]

    def _add_arguments(self, text: str) -> list[Part]:
        if self.has_started:
            return [CallArguments(self._index, text)]
        self._held.append(text)
        return []

    def _end(self) -> list[Part]:
        self.is_over = True
        if self.has_started and not self._has_arguments:
            return [CallArguments(self._index, "{}")]
        return []

    @property
    def _holds_arguments(self) -> bool:
        return self._key in _ARGUMENT_KEYS and not self._has_arguments

    def _take(self) -> str:
        text = "".join(self._value)
        self._value.clear()
        return text

    def _is_name(self, name: str) -> bool:
        if self._names is not None:
            return name in self._names
        return _NAME.fullmatch(name) is not None


def _as_object(text: str) -> str:
    """Return arguments that were not written as an object: some models quote it, or write null."""
    if text == "null":
        return "{}"
    quoted = _string(text)
    return text if quoted is None else quoted


def _string(text: str) -> str | None:
    """Return the text of a JSON string; None if it is none."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, str) else None


def _joined(parts: list[Part]) -> list[Part]:
    """Join neighbouring pieces of arguments."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, CallArguments) and isinstance(last, CallArguments):
            joined[-1] = CallArguments(part.index, last.text + part.text)
        else:
            joined.append(part)
    return joined
