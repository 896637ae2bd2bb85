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
    what was just admitted. They are a share of the pool, but at least a block for each of the
    others, since a share alone is next to nothing in a small pool (see ADR 5).
    """

    def __init__(self, num_blocks: int, share: float) -> None:
        """Leave ``share`` of ``num_blocks`` free; a share of 0 leaves none at all."""
        self._num_reserved = int(share * num_blocks)
        self._num_each = 1 if share else 0

    def may_admit(self, need: BlockNeed, num_running: int) -> bool:
        """Compare the need, and the reserve if something runs, with what is available."""
        if not num_running:
            return need.num_new <= need.num_available
        reserve = max(self._num_reserved, self._num_each * num_running) + need.num_branches
        return need.num_new + reserve <= need.num_available
