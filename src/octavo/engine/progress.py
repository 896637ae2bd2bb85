"""A progress bar for long offline work, drawn only when asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


class Progress:
    """Counts what is done; this one draws nothing."""

    def advance(self) -> None:
        """Count one more as done."""


class _Drawn(Progress):
    """Moves one task of a bar."""

    def __init__(self, bar: "Bar", task: "TaskID") -> None:
        self._bar = bar
        self._task = task

    def advance(self) -> None:
        self._bar.advance(self._task)


@contextmanager
def progress_bar(title: str, total: int, *, show: bool) -> Iterator[Progress]:
    """Draw a bar on standard error while the block runs."""
    if not show:
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=False) as bar:
        yield _Drawn(bar, bar.add_task(title, total=total))
