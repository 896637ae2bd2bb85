"""Separates what a model writes to itself from its answer, at ``<think>`` and ``</think>``."""

from typing import Final

from octavo.server.tools.marks import held_length
from octavo.server.tools.parts import Part, Reasoning, Text

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


def uses_reasoning(template: str) -> bool:
    """Whether a chat template's text shows that its model reasons between marks."""
    return OPEN in template or CLOSE in template


class ReasoningSplitter:
    """Splits an answer at its first reasoning; white space around the marks is dropped.

    Reasoning is what an answer begins with, if its prompt opened the mark or it does so itself.
    An answer that ends inside is all reasoning. What comes later with such marks is text.
    """

    def __init__(self, *, starts_inside: bool) -> None:
        self._state = "inside" if starts_inside else "before"
        self._pending = ""

    def push(self, text: str) -> list[Part]:
        """Read on; return what is certain."""
        self._pending += text
        parts: list[Part] = []
        while (part := self._advance()) is not None:
            parts += [part] if part.text else []
        return parts

    def finish(self) -> list[Part]:
        """Return what was held back."""
        text, self._pending = self._pending, ""
        if self._state in ("inside", "within"):
            text = text.rstrip()
            return [Reasoning(text)] if text else []
        return [Text(text)] if text and self._state != "after" else []

    def _advance(self) -> Text | Reasoning | None:
        """Take one decision; None: it takes more text."""
        match self._state:
            case "before":
                return self._before()
            case "inside" | "within":
                return self._inside()
            case "after":
                self._pending = self._pending.lstrip()
                if not self._pending:
                    return None
                self._state = "text"
                return Text("")
        text, self._pending = self._pending, ""
        return Text(text) if text else None

    def _before(self) -> Text | None:
        start = self._pending.lstrip()
        if start.startswith(OPEN):
            self._pending, self._state = start[len(OPEN) :], "inside"
            return Text("")
        if OPEN.startswith(start):  # also where there is nothing yet
            return None
        self._state = "text"
        return Text("")

    def _inside(self) -> Reasoning | None:
        if self._state == "inside":  # nothing of it was handed on yet
            self._pending = self._pending.lstrip()
        thought, mark, rest = self._pending.partition(CLOSE)
        if mark:
            self._pending, self._state = rest, "after"
            return Reasoning(thought.rstrip())
        sure = thought[: len(thought) - held_length(thought, CLOSE)].rstrip()
        if not sure:
            return None
        self._pending, self._state = thought[len(sure) :], "within"
        return Reasoning(sure)
