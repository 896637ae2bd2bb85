"""Reads an answer as its request wants it read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from octavo.server.tools.call_parser import CallParser
from octavo.server.tools.parts import Message, Part, Text, assemble
from octavo.server.tools.reasoning import ReasoningSplitter
from octavo.server.tools.styles import ToolStyle


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What there is to find in an answer."""

    calls: ToolStyle | None = None
    """How calls are written; None: there are none."""
    tool_names: frozenset[str] = frozenset()
    single_call: bool = False
    """Whether the answer ends with its first call."""
    reasoning: bool = False
    """Whether reasoning is set apart."""
    in_reasoning: bool = False
    """Whether the prompt ends inside of it."""

    def read(self, text: str, *, is_cut: bool = False) -> Message:
        """Return a whole answer, or what was cut of one by the token limit."""
        parser = OutputParser(self)
        parts = [*parser.push(text), *parser.finish(is_cut=is_cut)]
        return assemble(parts, in_call=parser.in_call)


PLAIN: Final = OutputFormat()


class OutputParser:
    """Reads one answer as it comes. What it finds does not depend on the pieces."""

    def __init__(self, form: OutputFormat) -> None:
        self._reasoning = (
            ReasoningSplitter(starts_inside=form.in_reasoning) if form.reasoning else None
        )
        self._calls = (
            CallParser(form.calls, form.tool_names, single=form.single_call)
            if form.calls is not None
            else None
        )

    def push(self, text: str) -> list[Part]:
        """Read on; return what is certain."""
        parts: list[Part] = [Text(text)] if text else []
        if self._reasoning is not None:
            parts = self._reasoning.push(text)
        return self._find_calls(parts)

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return what was held back; but no call whose name the token limit has cut."""
        parts: list[Part] = [] if self._reasoning is None else self._reasoning.finish()
        parts = self._find_calls(parts)
        return parts if self._calls is None else [*parts, *self._calls.finish(is_cut=is_cut)]

    @property
    def in_call(self) -> bool:
        """Whether what was read ends inside a call."""
        return self._calls is not None and self._calls.in_call

    def _find_calls(self, parts: list[Part]) -> list[Part]:
        if self._calls is None:
            return parts
        read: Callable[[str], list[Part]] = self._calls.push
        return [
            found
            for part in parts
            for found in (read(part.text) if isinstance(part, Text) else [part])
        ]
