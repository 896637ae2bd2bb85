"""Finding marks in text that comes in pieces."""


def held_length(text: str, mark: str) -> int:
    """Return the length of the longest end of ``text`` that could begin ``mark``."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
