"""The packed ragged batch of one step: no padding, prefill chunks and decodes side by side."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


@dataclass(slots=True)
class StepBatch:
    """N tokens of S sequences, the tokens of a sequence next to each other. Nobody changes it.

    The names follow Ragged Paged Attention (arXiv 2604.15464).
    """

    token_ids: Int32
    """``[N]``."""
    cu_query_lens: Int32
    """``[S + 1]``: sequence i has tokens ``cu_query_lens[i]`` to ``cu_query_lens[i + 1]``."""
    kv_lens: Int32
    """``[S]``: tokens of each sequence that have KV once this step has stored its own, which are
    the last of them."""
    block_tables: Int32
    """``[S, width]``: block ids; entries past ``ceil(kv_lens / block_size)`` mean nothing."""
    logits_rows: Int32
    """``[R]``: tokens whose logits are wanted, ascending."""

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.kv_lens)

    @property
    def positions(self) -> Int32:
        """``[N]``, computed: index of each token in its sequence; rotary position, causal bound."""
        before = self.kv_lens - self.cu_query_lens[1:]
        return np.arange(self.num_tokens, dtype=np.int32) + np.repeat(before, self._lens)

    def slots(self, block_size: int) -> Int32:
        """Return ``[N]``: where each token's KV goes, ``block_id * block_size + offset``."""
        sequences = np.repeat(np.arange(self.num_sequences), self._lens)
        blocks, offsets = np.divmod(self.positions, block_size)
        return self.block_tables[sequences, blocks] * np.int32(block_size) + offsets

    @property
    def _lens(self) -> Int32:
        return np.diff(self.cu_query_lens)
