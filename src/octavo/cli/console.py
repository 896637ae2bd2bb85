"""What commands write to standard error: one-sentence errors, progress bars, spinners.

rich is imported only where something is drawn: ``--help`` must stay quick.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def print_error(message: str) -> None:
    """Write the message as one sentence on one line."""
    line = " ".join(message.split())
    ending = "" if line.endswith((".", "!", "?", "`")) else "."
    print(f"Error: {line}{ending}", file=sys.stderr)


def print_note(message: str) -> None:
    """Write a line that is not the command's result."""
    print(message, file=sys.stderr)


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function (bytes done, bytes in all) that draws a bar from its first call on.

    Nothing is drawn where standard error is not a terminal.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


@contextmanager
def spinner(title: str) -> Iterator[None]:
    """Turn a spinner while the block runs; nothing where standard error is not a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(title):
        yield
