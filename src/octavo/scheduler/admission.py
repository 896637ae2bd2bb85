"""Whether a waiting sequence fits the KV cache now."""

from typing import Protocol

from octavo.kvcache.manager import BlockNeed


class AdmissionPolicy(Protocol):
    """Decides who starts; the order of trying is the queue's."""

    def may_admit(self, need: BlockNeed, num_running: int) -> bool:
        """Whether to start a sequence that takes ``need`` beside ``num_running`` others.

        With nothing running it must say yes to all that fits, or nothing would ever run.
        """


class Watermark:
    """All tokens that a sequence has must fit, and leave some blocks free while others run.

    The blocks left are room for those others to grow: without them the next decode would preempt
    what was just admitted.
    """

    def __init__(self, num_reserved: int) -> None:
        self._num_reserved = num_reserved

    def may_admit(self, need: BlockNeed, num_running: int) -> bool:
        """Compare the need, and the reserve if something runs, with what is available."""
        reserve = self._num_reserved + need.num_branches if num_running else 0
        return need.num_new + reserve <= need.num_available
