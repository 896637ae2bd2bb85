"""The packed ragged batch of one step: no padding, prefill chunks and decodes side by side."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """N tokens of S sequences, the tokens of a sequence next to each other.

    The names follow Ragged Paged Attention (arXiv 2604.15464).
    """

    token_ids: Int32
    """``[N]``."""
    positions: Int32
    """``[N]``: index of each token in its sequence; rotary position and causal bound."""
    cu_query_lens: Int32
    """``[S + 1]``: sequence i has tokens ``cu_query_lens[i]`` to ``cu_query_lens[i + 1]``."""
    kv_lens: Int32
    """``[S]``: tokens of each sequence that have KV once this step has stored its own."""
    block_tables: Int32
    """``[S, width]``: block ids; entries past ``ceil(kv_lens / block_size)`` mean nothing."""
    slots: Int32
    """``[N]``: where each token's KV goes, ``block_id * block_size + offset``."""
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
