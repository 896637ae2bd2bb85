"""How much of a long prompt is computed in one step."""

from typing import Final

from octavo.core.config import SchedulerConfig

SHARE: Final = 8
"""While others wait behind it, a prefill leaves one part in so many of what is left to them."""


class Chunking:
    """Sizes the chunks of prefills.

    A long prompt would take every step's whole budget until it is done, and a short one behind it
    would wait for all of it. So a prefill with others behind it leaves them an eighth of the
    budget; what they do not use it gets back in the same step (``more``).

    Without chunked prefill a prompt is computed whole or waits.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._chunked = config.enable_chunked_prefill
        self._threshold = config.long_prefill_token_threshold or config.max_num_batched_tokens

    def first(self, uncomputed: int, left: int, *, others_behind: bool) -> int:
        """Return the tokens to compute now, 0 to wait.

        Args:
            uncomputed: tokens of the sequence without KV, at least 1.
            left: tokens that the step may still compute.
            others_behind: whether prefills or waiting sequences are tried after this one.
        """
        if not self._chunked:
            return uncomputed if uncomputed <= left else 0
        if others_behind and left > 1:
            left -= max(1, left // SHARE)
        return min(uncomputed, self._threshold, left)

    def more(self, uncomputed: int, placed: int, left: int) -> int:
        """Return the tokens to add to the ``placed`` ones of a running prefill."""
        if not self._chunked:
            return 0
        return min(uncomputed - placed, self._threshold - placed, left)
