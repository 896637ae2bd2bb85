"""Embeddings: hidden states of prompts instead of logits, pooled to one vector a sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import GenerationError, RequestError
from octavo.core.ids import SequenceId
from octavo.kernels.ops import StepFunction
from octavo.runner.input_batch import Chunk, build_batch

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]

NOT_FINITE: Final = "The model's hidden states for this request are not finite numbers."


@dataclass(frozen=True, slots=True)
class Pooled:
    """What a call computed."""

    embeddings: dict[SequenceId, tuple[float, ...]] = field(default_factory=dict)
    """Of sequences whose prompt is complete now."""
    failed: dict[SequenceId, RequestError] = field(default_factory=dict)


class Pooler:
    """Pools the states after the last norm, those that the head would turn into logits.

    ``last`` takes the state of the prompt's last token, ``mean`` the mean over all of them, summed
    in float64 so that chunks do not change it. Vectors are not normalised.
    """

    def __init__(self, compile: Callable[[], StepFunction], *, block_size: int) -> None:
        """Remember how to compute.

        Args:
            compile: returns a step function of hidden states; called when it is first needed, as
                most servers never embed.
            block_size: token slots per block.
        """
        self._compile = compile
        self._block_size = block_size
        self._step: StepFunction | None = None
        self._sums: dict[SequenceId, Float64] = {}

    def run(self, chunks: Sequence[Chunk], block_tables: Int32) -> Pooled:
        """Compute chunks of prompts that are to be embedded; at least one."""
        if self._step is None:
            self._step = self._compile()
        batch = build_batch(chunks, block_tables, self._block_size)
        ends = batch.cu_query_lens.tolist()
        spans = [
            (first if chunk.row.params.pooling == "mean" else stop - 1, stop)
            for chunk, first, stop in zip(chunks, ends[:-1], ends[1:], strict=True)
        ]
        rows = np.concatenate([np.arange(first, stop, dtype=np.int32) for first, stop in spans])
        states = self._step(replace(batch, logits_rows=rows))
        pooled, start = Pooled(), 0
        for chunk, (first, stop) in zip(chunks, spans, strict=True):
            self._add(chunk, states[start : start + stop - first], pooled)
            start += stop - first
        return pooled

    def release(self, sequence_id: SequenceId) -> None:
        """Forget a sequence; one that comes back is computed from its start."""
        self._sums.pop(sequence_id, None)

    def _add(self, chunk: Chunk, states: Float32, pooled: Pooled) -> None:
        row, name = chunk.row, chunk.row.sequence_id
        vector = states.sum(axis=0, dtype=np.float64)
        if row.params.pooling == "mean":
            vector += self._sums.get(name, 0.0)
            self._sums[name] = vector
        if chunk.start + len(chunk.token_ids) < row.num_prompt_tokens:
            return
        if row.params.pooling == "mean":
            vector = vector / row.num_prompt_tokens
        if np.isfinite(vector).all():
            pooled.embeddings[name] = tuple(vector.tolist())
        else:
            pooled.failed[name] = GenerationError(NOT_FINITE)
