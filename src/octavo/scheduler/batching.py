"""When a batch may take in new sequences: the policy behind ``--batching-policy``."""

from typing import Final, Protocol

from octavo.core.registry import Registry


class BatchingPolicy(Protocol):
    """Says, once per step, whether waiting sequences are looked at."""

    def may_start(self, num_running: int) -> bool:
        """Whether sequences may start in a step that begins with ``num_running`` of them.

        With nothing running it must say yes, or nothing would ever run.
        """


class ContinuousBatching:
    """Whoever fits joins at the next step (Orca's iteration-level scheduling)."""

    def may_start(self, num_running: int) -> bool:
        """Return True."""
        return True


class StaticBatching:
    """Request-level batching (FasterTransformer): a batch runs until all of it is done.

    What is modelled: nobody joins a running batch. What is not, in its favour: prompts are not
    padded to the longest, and a sequence that is done costs no more computing; its client has its
    answer at once, where FasterTransformer hands out all answers at the end of the batch. A
    sequence that was preempted waits for the next batch.
    """

    def may_start(self, num_running: int) -> bool:
        """Return whether the last batch is done."""
        return num_running == 0


BATCHING_POLICIES: Final[Registry[BatchingPolicy]] = Registry(
    "--batching-policy",
    ("may_start",),
    {"continuous": ContinuousBatching, "static": StaticBatching},
)
