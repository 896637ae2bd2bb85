"""A progress bar for long offline work, drawn only when asked for."""

from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Counts what is done; this one draws nothing."""

    def advance(self) -> None:
        """Count one more as done."""


@contextmanager
def progress_bar(title: str, total: int, *, show: bool) -> Iterator[Progress]:
    """Draw a bar on standard error while the block runs."""
    if not show:
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=False) as bar:
        task = bar.add_task(title, total=total)

        class Drawn(Progress):
            def advance(self) -> None:
                bar.advance(task)

        yield Drawn()
