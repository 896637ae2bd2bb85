"""Paged attention of the numpy backend: decodes in padded groups, prefill chunks tile by tile."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.batch import StepBatch
from octavo.kernels.numpy_kv import NumpyKV
from octavo.kernels.ops import Attention

Float32 = NDArray[np.float32]
Int = NDArray[np.intp]

_MAX_VALUES = 1 << 22
"""Bound on the scores of a tile and on the gathered keys of a group: 16 MB each."""

_MAX_TILE_ROWS = 128
"""Query rows of a tile: fewer waste less work on keys that the causal bound hides."""

_MIN_FILL = 0.75
"""Shortest to longest sequence of a padded group of decodes."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query token each, of similar length, computed as one padded batch."""

    rows: Int
    """``[S]``: rows of the packed batch."""
    tables: NDArray[np.int32]
    """``[S, width]``: block ids, padded with each sequence's own first block."""
    first: Int
    """``[S]``: first visible token, counted from the start of the gathered blocks."""
    ends: Int
    """``[S]``: one past the last visible token, counted likewise."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Several query tokens of one sequence."""

    first_row: int
    num_rows: int
    table: NDArray[np.int32]
    """Block ids of all tokens that any of its queries sees."""
    offset: int
    """Position of the first token of the gathered blocks."""
    start: int
    """Position of the first query token."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the queries of a step are cut into work, for one sliding window."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PrefillChunk, ...]


def plan_attention(
    batch: StepBatch, window: int | None, block_size: int, slot_values: int
) -> AttentionPlan:
    """Cut the batch into work; ``slot_values`` is the number of key values in a slot.

    The tokens of a sequence in a batch are its last ones: positions end at ``kv_lens - 1``.
    """
    lens = np.diff(batch.cu_query_lens)
    starts = batch.kv_lens - lens
    seen_from = np.zeros_like(starts) if window is None else np.maximum(0, starts - window + 1)
    first_blocks = seen_from // block_size
    end_blocks = -(-batch.kv_lens // block_size)
    chunks = tuple(
        PrefillChunk(
            first_row=int(batch.cu_query_lens[i]),
            num_rows=int(lens[i]),
            table=batch.block_tables[i, first_blocks[i] : end_blocks[i]],
            offset=int(first_blocks[i]) * block_size,
            start=int(starts[i]),
        )
        for i in np.flatnonzero(lens > 1)
    )
    decodes = np.flatnonzero(lens == 1)
    widths = end_blocks - first_blocks
    groups = tuple(
        DecodeGroup(
            rows=batch.cu_query_lens[members].astype(np.intp),
            tables=_padded_tables(batch, members, first_blocks, widths),
            first=(seen_from - first_blocks * block_size)[members].astype(np.intp),
            ends=(batch.kv_lens - first_blocks * block_size)[members].astype(np.intp),
        )
        for members in _similar(decodes, widths, _MAX_VALUES // (block_size * slot_values))
    )
    return AttentionPlan(groups, chunks)


def _similar(members: Int, widths: NDArray[np.int32], max_blocks: int) -> Iterator[Int]:
    """Split ``members`` into runs of similar width whose padded size stays bounded."""
    ordered = members[np.argsort(-widths[members], kind="stable")]
    begin = 0
    for i in range(1, len(ordered) + 1):
        longest = int(widths[ordered[begin]])
        if i < len(ordered):
            fills = widths[ordered[i]] >= _MIN_FILL * longest
            if fills and (i - begin + 1) * longest <= max_blocks:
                continue
        yield ordered[begin:i]
        begin = i


def _padded_tables(
    batch: StepBatch, members: Int, first_blocks: NDArray[np.int32], widths: NDArray[np.int32]
) -> NDArray[np.int32]:
    columns = np.arange(int(widths[members].max()))[None, :]
    columns = np.where(columns < widths[members, None], columns, 0)
    tables: NDArray[np.int32] = batch.block_tables[
        members[:, None], first_blocks[members, None] + columns
    ]
    return tables


def paged_attention(q: Float32, plan: AttentionPlan, kv: NumpyKV, attention: Attention) -> Float32:
    """Return ``[N, num_heads * head_dim]`` for queries of the same shape."""
    out = np.empty_like(q)
    for group in plan.groups:
        out[group.rows] = _decode(q[group.rows], group, kv, attention)
    for chunk in plan.chunks:
        rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
        out[rows] = _prefill(q[rows], chunk, kv, attention)
    return out


def _grouped(q: Float32, attention: Attention) -> Float32:
    """Return queries as ``[rows, kv_heads, heads per kv head, head_dim]``, scaled."""
    shape = (len(q), attention.num_kv_heads, -1, attention.head_dim)
    return q.reshape(shape) * np.float32(attention.scale)


def _decode(q: Float32, group: DecodeGroup, kv: NumpyKV, attention: Attention) -> Float32:
    keys, values = kv.gather(attention.layer, group.tables)  # [G, S, T, D]
    for i, end in enumerate(group.ends):
        values[:, i, end:] = 0.0  # stale memory may hold NaN, which no weight of 0 would hide
    queries = _grouped(q, attention).transpose(1, 0, 2, 3)  # [G, S, R, D]
    scores = _softcapped(queries @ keys.swapaxes(-1, -2), attention)
    places = np.arange(keys.shape[2])[None, :]
    visible = (places >= group.first[:, None]) & (places < group.ends[:, None])
    weights = _softmax(np.where(visible[None, :, None, :], scores, np.float32(-np.inf)))
    mixed = weights @ values
    return mixed.transpose(1, 0, 2, 3).reshape(q.shape)


def _prefill(q: Float32, chunk: PrefillChunk, kv: NumpyKV, attention: Attention) -> Float32:
    keys, values = kv.gather(attention.layer, chunk.table)  # [G, T, D]
    queries = _grouped(q, attention).transpose(1, 2, 0, 3)  # [G, R, rows, D]
    out = np.empty_like(queries)
    end = chunk.start + chunk.num_rows
    most_rows = _MAX_VALUES // (attention.num_heads * (end - chunk.offset))
    tile = min(_MAX_TILE_ROWS, max(1, most_rows))
    for first in range(0, chunk.num_rows, tile):
        last = min(first + tile, chunk.num_rows)
        positions = np.arange(chunk.start + first, chunk.start + last)
        window = attention.sliding_window
        low = chunk.offset if window is None else max(chunk.offset, positions[0] - window + 1)
        seen = slice(low - chunk.offset, positions[-1] + 1 - chunk.offset)
        part = queries[:, :, first:last]
        shape = (part.shape[0], -1, attention.head_dim)
        scores = _softcapped(part.reshape(shape) @ keys[:, seen].swapaxes(-1, -2), attention)
        scores = scores.reshape(*part.shape[:3], -1)
        places = np.arange(low, positions[-1] + 1)
        hidden = places[None, :] > positions[:, None]
        if window is not None:
            hidden |= places[None, :] <= positions[:, None] - window
        np.copyto(scores, np.float32(-np.inf), where=hidden)
        weights = _softmax(scores).reshape(shape[0], -1, len(places))
        out[:, :, first:last] = (weights @ values[:, seen]).reshape(part.shape)
    return out.transpose(2, 0, 1, 3).reshape(q.shape)


def _softcapped(scores: Float32, attention: Attention) -> Float32:
    if attention.softcap is None:
        return scores
    cap = np.float32(attention.softcap)
    capped: Float32 = np.tanh(scores / cap) * cap
    return capped


def _softmax(scores: Float32) -> Float32:
    """Softmax over the last axis, in place; each row has at least one finite score."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores
