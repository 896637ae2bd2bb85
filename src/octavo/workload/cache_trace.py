"""Traces of prompts as the cache sees them: blocks, by hash or by token ids."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.errors import LoadError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One prompt."""

    token_ids: tuple[int, ...]
    """Tokens, or one number per block in a trace of hashes."""
    num_tokens: int
    """Tokens of the prompt."""
    arrival_s: float = 0.0
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class CacheTrace:
    """Prompts in order of arrival."""

    name: str
    requests: tuple[TraceRequest, ...]
    block_size: int
    """Entries of ``token_ids`` per block: 1 in a trace of hashes."""
    tokens_per_block: int
    """Tokens that a block stands for."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def num_touches(self) -> int:
        """Blocks of all prompts, each as often as it occurs."""
        return sum(len(request.token_ids) // self.block_size for request in self.requests)

    def head(self, num_requests: int) -> "CacheTrace":
        """Return the trace of the first requests."""
        kept = self.requests[:num_requests]
        return CacheTrace(self.name, kept, self.block_size, self.tokens_per_block)


def hash_trace(
    name: str, prompts: Iterable[Sequence[object]], tokens_per_block: int = 512
) -> CacheTrace:
    """Make a trace of prompts that are given as hashes of their blocks.

    Any hashable values do; equal ones need only mean equal blocks after equal prefixes.
    """
    numbers: dict[object, int] = {}
    requests = []
    for hashes in prompts:
        ids = tuple(numbers.setdefault(value, len(numbers)) for value in hashes)
        requests.append(TraceRequest(ids, len(ids) * tokens_per_block))
    return CacheTrace(name, tuple(requests), 1, tokens_per_block)


def read_mooncake(path: Path, tokens_per_block: int = 512) -> CacheTrace:
    """Read a trace of the Mooncake project (FAST'25): ``hash_ids`` of 512-token blocks.

    The last block of a prompt may be partly filled, and counts as a block like any other.

    Raises:
        LoadError: a line is not of that format.
    """
    requests = []
    for where, row in _rows(path):
        try:
            ids = tuple(int(value) for value in row["hash_ids"])
            arrival_s = float(row.get("timestamp", 0)) / 1000
            request = TraceRequest(ids, int(row["input_length"]), arrival_s)
        except (KeyError, TypeError, ValueError) as error:
            raise LoadError(
                f"{where} is no request of a Mooncake trace (timestamp, input_length, hash_ids): "
                f"{error!r}."
            ) from error
        requests.append(request)
    return CacheTrace(path.stem, tuple(requests), 1, tokens_per_block)


def read_token_ids(path: Path, block_size: int) -> CacheTrace:
    """Read prompts as token ids: lines of JSON with ``token_ids`` and, perhaps, ``timestamp``
    (seconds) and ``tenant``.

    Raises:
        LoadError: a line is not of that format.
    """
    requests = []
    for where, row in _rows(path):
        try:
            ids = tuple(int(value) for value in row["token_ids"])
            arrival_s, tenant = float(row.get("timestamp", 0.0)), str(row.get("tenant", ""))
        except (KeyError, TypeError, ValueError) as error:
            raise LoadError(f"{where} is no prompt of token_ids: {error!r}.") from error
        requests.append(TraceRequest(ids, len(ids), arrival_s, tenant))
    return CacheTrace(path.stem, tuple(requests), block_size, block_size)


def read_sessions(folder: Path, chars_per_block: int = 2048) -> CacheTrace:
    """Read agent sessions with real text (``*.jsonl``: ``timestamp``, ``input``), interleaved.

    Blocks are equal stretches of characters; 2,048 of them are about 512 tokens.

    Raises:
        LoadError: there is no session, or a line is not of that format.
    """
    prompts: list[tuple[float, list[str]]] = []
    for path in sorted(folder.glob("*.jsonl")):
        for where, row in _rows(path):
            try:
                messages, time = row["input"], float(row["timestamp"])
            except (KeyError, TypeError, ValueError) as error:
                raise LoadError(f"{where} is no step of a session: {error!r}.") from error
            text = messages if isinstance(messages, str) else json.dumps(messages)
            ends = range(chars_per_block, len(text) + 1, chars_per_block)
            prompts.append((time, [text[end - chars_per_block : end] for end in ends]))
    if not prompts:
        raise LoadError(f"{folder} holds no sessions (*.jsonl).")
    prompts.sort(key=lambda item: item[0])
    return hash_trace(folder.name, (blocks for _, blocks in prompts), chars_per_block // 4)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise LoadError(f"{path}, line {number} is no JSON: {error}.") from error
        if not isinstance(row, dict):
            raise LoadError(f"{path}, line {number} is no JSON object.")
        yield f"{path}, line {number}", row
