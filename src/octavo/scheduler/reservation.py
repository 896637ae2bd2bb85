"""How much KV room a sequence takes when it starts: the policy behind ``--kv-reservation``.

``paged`` takes what the tokens at hand need and grows block by block (PagedAttention). The others
are the three variants of Orca in the PagedAttention paper (section 6.1): one contiguous run for
all that the sequence will ever need, as far as the system can know. The KV cache manager places
the runs (``kvcache/contiguous.py``).
"""

from typing import Final, Protocol

from octavo.core.registry import Registry
from octavo.scheduler.sequence import SequenceView


class KVReservation(Protocol):
    """Sizes the room that a sequence takes at its start."""

    def num_slots(self, sequence: SequenceView, max_model_len: int) -> int:
        """Return token slots; fewer than it has tokens or more than the pool has are corrected.

        All but ``paged`` must return at least ``final_num_slots``: a run cannot grow.
        """


class Paged:
    """What the tokens at hand need; the rest on demand."""

    def num_slots(self, sequence: SequenceView, max_model_len: int) -> int:
        """Return the number of tokens that it has."""
        return sequence.num_tokens


class ReserveMax:
    """The longest that any sequence may become (Orca Max, FasterTransformer)."""

    def num_slots(self, sequence: SequenceView, max_model_len: int) -> int:
        """Return the context length."""
        return max_model_len


class ReservePowerOfTwo:
    """The prompt and the next power of two of its output (Orca Pow2): at most twice the output."""

    def num_slots(self, sequence: SequenceView, max_model_len: int) -> int:
        """Return prompt tokens plus the rounded output length, within the context."""
        output = 1 << max(sequence.max_tokens - 1, 0).bit_length()
        return min(sequence.num_prompt_tokens + output, max_model_len)


class ReserveOracle:
    """Exactly what it will need (Orca Oracle): what no real system can know.

    The output length is taken to be ``max_tokens``, so it is true for workloads that generate
    exactly so many tokens (``ignore_eos``), as those of the benchmark do.
    """

    def num_slots(self, sequence: SequenceView, max_model_len: int) -> int:
        """Return the final length."""
        return final_num_slots(sequence)


def final_num_slots(sequence: SequenceView) -> int:
    """Return the tokens of a whole life that need KV: the last sampled one needs none."""
    return sequence.num_prompt_tokens + max(sequence.max_tokens - 1, 0)


KV_RESERVATIONS: Final[Registry[KVReservation]] = Registry(
    "--kv-reservation",
    ("num_slots",),
    {
        "paged": Paged,
        "max": ReserveMax,
        "pow2": ReservePowerOfTwo,
        "oracle": ReserveOracle,
    },
)
