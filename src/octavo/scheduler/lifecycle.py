"""The states of a sequence and the only moves between them."""

from enum import Enum
from typing import Final

from octavo.core.errors import InvariantError


class SequenceStatus(Enum):
    """Where a sequence is, and so which collection of the scheduler holds it."""

    WAITING = "waiting"
    """Never ran; in the waiting queue, without blocks."""
    RUNNING = "running"
    """Has blocks and a row in the runner; in ``running``."""
    PREEMPTED = "preempted"
    """Ran, lost its blocks; in the waiting queue, ahead of its equals."""
    FINISHED = "finished"
    """Gone: in no collection, without blocks."""


_W, _R, _P, _F = SequenceStatus

TRANSITIONS: Final[frozenset[tuple[SequenceStatus, SequenceStatus]]] = frozenset(
    {
        (_W, _R),  # admitted
        (_R, _P),  # preempted
        (_P, _R),  # resumed
        (_W, _F),  # aborted before it ran
        (_R, _F),  # finished, aborted or failed
        (_P, _F),  # aborted, or its stop string was found, while preempted
    }
)
"""Every legal move as (from, to)."""


def check_transition(old: SequenceStatus, new: SequenceStatus, story: str) -> None:
    """Raise InvariantError, with the sequence's story, unless ``old`` may become ``new``."""
    if (old, new) not in TRANSITIONS:
        raise InvariantError(f"a {old.value} sequence cannot become {new.value}", story=story)
