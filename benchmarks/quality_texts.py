"""Real text to score: mt-bench questions and prompts of coding agents, as documents of tokens."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Document:
    """One context."""

    source: str
    tokens: tuple[int, ...]


class NoTexts(Exception):
    """The texts are not there; the message is one sentence."""


def documents(traces: Path, encode: Encode, *, num_tokens: int, context: int) -> list[Document]:
    """Cut documents of at most ``context`` tokens, one source after the other, to ``num_tokens``.

    Raises:
        NoTexts: the folder lacks them, or has too few.
    """
    sources = [
        mt_bench(_found(traces / "mt-bench" / "question.jsonl"), encode, context),
        miniswe(_found(traces / "miniswe"), encode, context),
    ]
    chosen: list[Document] = []
    left = num_tokens
    for group in itertools.zip_longest(*sources):
        for document in group:
            if document is not None and left > 1:
                chosen.append(Document(document.source, document.tokens[:left]))
                left -= len(chosen[-1].tokens)
    if left > 1:
        raise NoTexts(f"{traces} has only {num_tokens - left} tokens of text; ask for fewer.")
    return chosen


def mt_bench(path: Path, encode: Encode, context: int) -> Iterator[Document]:
    """Yield the questions, both turns of each, one after the other in full contexts."""
    turns = [turn for question in _lines(path) for turn in question["turns"]]
    tokens = encode("\n\n".join(turns))
    for start in range(0, len(tokens) - context + 1, context):
        yield Document("mt-bench", tuple(tokens[start : start + context]))


def miniswe(folder: Path, encode: Encode, context: int) -> Iterator[Document]:
    """Yield the end of each session's longest prompt, if it fills a context: code and its output.

    The beginning is the same instructions in all sessions.
    """
    for path in sorted(folder.glob("*.jsonl")):
        tokens = encode(max((line["input"] for line in _lines(path)), key=len))
        if len(tokens) >= context:
            yield Document("miniswe", tuple(tokens[-context:]))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _found(path: Path) -> Path:
    if not path.exists():
        raise NoTexts(f"There is no {path}; name the folder of traces with --traces.")
    return path
