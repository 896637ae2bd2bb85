"""Finds the tool calls in an answer as it comes."""

from typing import Final

from octavo.server.tools.call_scanner import CallScanner
from octavo.server.tools.marks import held_length
from octavo.server.tools.parts import Part, Text
from octavo.server.tools.styles import ToolStyle

_NAME_ENDS: Final = "[ARGS]"
_CALL_ID: Final = "[CALL_ID]"
_MAX_NAME: Final = 256


class CallParser:
    """Splits an answer into text and calls.

    White space before, between and after calls is dropped. What begins like a call and is none
    comes back as the text it is. The result does not depend on how the text was cut into pieces.
    """

    def __init__(self, style: ToolStyle, names: frozenset[str], *, single: bool) -> None:
        """Start at the beginning of an answer.

        Args:
            style: how calls are written.
            names: the tools there are; where a call needs no mark, only these names make one.
            single: whether the answer ends with its first call.
        """
        self._style = style
        self._names = names
        self._single = single
        self._state = "start" if style.bare else "text"
        self._pending = ""
        self._scanner: CallScanner | None = None
        self._intro = ""  # what was read before the object, should it be no call
        self._is_marked = False  # whether what looks like a call can be nothing else
        self._num_calls = 0

    def push(self, text: str) -> list[Part]:
        """Read on; return what is certain."""
        self._pending += text
        parts: list[Part] = []
        while (step := self._advance()) is not None:
            parts += step
        return parts

    @property
    def in_call(self) -> bool:
        """Whether what was read ends inside a call."""
        scanner = self._scanner if self._state == "call" else None
        return scanner is not None and scanner.has_started

    def finish(self, *, is_cut: bool) -> list[Part]:
        """Return what was held back; of an answer that is cut, no call that a mark began."""
        text, self._pending = self._pending, ""
        if self._state == "call" and self._scanner is not None:
            is_dropped = self._scanner.has_started or (is_cut and self._is_marked)
            text = "" if is_dropped else self._intro + self._scanner.raw
        elif self._state == "opening":
            text = "" if is_cut else self._intro + text
        elif self._state in ("between", "over") or (self._num_calls and not text.strip()):
            text = ""
        return [Text(text)] if text else []

    def _advance(self) -> list[Part] | None:
        """Take one decision; None: it takes more text."""
        match self._state:
            case "start":
                return self._start()
            case "text":
                return self._text()
            case "opening":
                return self._opening()
            case "call":
                return self._call()
            case "between":
                return self._between()
        self._pending = ""
        return None

    def _start(self) -> list[Part] | None:
        """Look whether the answer begins with a call without a mark."""
        rest = self._pending.lstrip()
        if not rest:
            return None
        if rest[0] == "{":
            self._begin(self._pending[: len(self._pending) - len(rest)], bare=True)
            self._pending = rest
        else:
            self._state = "text"
        return []

    def _text(self) -> list[Part] | None:
        """Hand text on until a mark; hold what may begin one, and white space before it."""
        mark = self._style.mark
        before, found, rest = self._pending.partition(mark)
        if found:
            spaces = before[len(before.rstrip()) :]
            self._pending, self._state, self._intro = rest, "opening", spaces + mark
            text = before.rstrip()
            return [Text(text)] if text else []
        sure = before[: len(before) - held_length(before, mark)].rstrip()
        if not sure:
            return None
        self._pending = before[len(sure) :]
        return [Text(sure)]

    def _opening(self) -> list[Part] | None:
        """Find where the first call after a mark begins."""
        rest = self._pending.lstrip()
        if rest.startswith("[") and self._style.named:
            rest = rest[1:].lstrip()
        if not rest:
            return None
        spaces = self._pending[: len(self._pending) - len(rest)]
        if rest[0] == "{":
            self._pending = rest
            self._begin(self._intro + spaces, bare=False)
            return []
        if self._style.named:
            return self._named(rest, spaces)
        return self._no_call()

    def _named(self, rest: str, spaces: str) -> list[Part] | None:
        """Read a name that stands before its arguments."""
        name, brace, _ = rest.partition("{")
        if not brace:
            return None if len(name) <= _MAX_NAME else self._no_call()
        self._pending = rest[len(name) :]
        self._begin(self._intro + spaces + name, bare=False)
        assert self._scanner is not None
        word = name.partition(_CALL_ID)[0].partition(_NAME_ENDS)[0]
        return self._scanner.begin_arguments(word.strip())

    def _begin(self, intro: str, *, bare: bool) -> None:
        names = self._names if bare else None
        self._scanner = CallScanner(self._num_calls, self._style.new_id(), names)
        self._intro, self._state = intro, "call"
        self._is_marked = not bare or self._num_calls > 0

    def _call(self) -> list[Part] | None:
        scanner = self._scanner
        assert scanner is not None
        if not scanner.is_over:
            if not self._pending:
                return None
            parts, self._pending = scanner.push(self._pending)
            return parts
        if not scanner.has_started:
            self._intro += scanner.raw
            return self._no_call()
        self._num_calls += 1
        self._state = "over" if self._single else "between"
        return []

    def _no_call(self) -> list[Part]:
        """Give back as text what looked like a call."""
        text, self._state = self._intro, "text"
        return [Text(text)] if text else []

    def _between(self) -> list[Part] | None:
        """Look what follows a call: its end mark, another call, or text."""
        rest = self._pending.lstrip()
        separators = self._style.separators
        for closer in self._style.closers:
            if rest.startswith(closer):
                self._pending = rest[len(closer) :]
                return []
            if closer.startswith(rest):
                self._pending = rest
                return None
        if not rest:
            self._pending = ""
            return None
        if rest[0] in separators:
            self._pending = rest[1:]
            return []
        if rest[0] == "{" and separators:
            self._pending = rest
            self._begin("", bare=self._style.bare)
            return []
        self._pending, self._state = rest, "text"
        return []
