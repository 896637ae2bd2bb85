"""Holds Ctrl-C back while the engine must not be cut in half."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class HeldInterrupts:
    """Remembers a Ctrl-C that came while interrupts are held."""

    def __init__(self) -> None:
        self._signals: list[int] = []

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Remember a signal: what a handler does in place of raising."""
        self._signals.append(number)

    def check(self) -> None:
        """Raise what was held back; call it where stopping is safe.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        if self._signals:
            self._signals.clear()
            raise KeyboardInterrupt


@contextmanager
def held_interrupts() -> Iterator[HeldInterrupts]:
    """Hold Ctrl-C back while the block runs; what is still held at its end is raised then.

    Python raises KeyboardInterrupt between any two bytecodes, so also halfway through a step,
    which no engine survives. Only Python's own handler is replaced, and only on the main thread,
    the one place where it raises: a caller's own handler keeps working.
    """
    held = HeldInterrupts()
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not is_ours:
        yield held
        return
    signal.signal(signal.SIGINT, held.note)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    held.check()
