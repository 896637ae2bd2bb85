"""Finds stop strings in a text that comes in pieces."""

import re
from collections.abc import Sequence


class StopStringMatcher:
    """Passes text on until a stop string is complete, and never lets a part of one out.

    Held back is only the longest end of the text that a stop string starts with. The match that
    is complete first wins; of those complete at the same character, the one that starts first. So
    the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        """Watch for ``stop``, none of them empty.

        Args:
            stop: texts that end the output.
            include: whether the stop string itself is passed on.
        """
        self._automata = [_PrefixAutomaton(text) for text in stop]
        self._starts = re.compile("|".join({re.escape(text[0]) for text in stop}))
        self._include = include
        self._held = ""
        self._matched = False

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return what may be passed on, and the stop string that is complete, if any.

        After a match all further text is dropped.
        """
        if self._matched:
            return "", None
        if not self._automata:
            return text, None
        kept = len(self._held)
        position = 0
        while position < len(text):
            if not kept:  # no stop string has begun, so skip to where one can
                start = self._starts.search(text, position)
                if start is None:
                    break
                position = start.start()
            complete = [a.text for a in self._automata if a.advance(text[position])]
            position += 1
            if complete:
                stop = max(complete, key=len)
                return self._end(text[:position], stop), stop
            kept = max(a.matched for a in self._automata)
        pending = self._held + text
        self._held = pending[len(pending) - kept :]
        return pending[: len(pending) - kept], None

    def finish(self) -> str:
        """End the text; return what was held back."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, stop: str) -> str:
        self._matched = True
        pending = self._held + text
        self._held = ""
        return pending if self._include else pending[: len(pending) - len(stop)]


class _PrefixAutomaton:
    """How much of one text the characters so far end with (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Number of characters at the start of ``text`` that the input ends with."""
        self._fallback = [0]  # of text[: i + 1]: its longest proper start that is also its end
        length = 0
        for character in text[1:]:
            length = self._step(length, character)
            self._fallback.append(length)

    def advance(self, character: str) -> bool:
        """Read a character; return whether the text is complete."""
        self.matched = self._step(self.matched, character)
        return self.matched == len(self.text)

    def _step(self, length: int, character: str) -> int:
        while length and self.text[length] != character:
            length = self._fallback[length - 1]
        return length + (self.text[length] == character)
