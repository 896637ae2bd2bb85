"""Standard input, and what goes to standard error: one-sentence errors, bars, spinners.

rich is imported only where something is drawn: ``--help`` must stay quick.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

from octavo.core.errors import SetupError


def standard_input() -> TextIO:
    """Return standard input.

    Raises:
        SetupError: whoever started this process has closed it.
    """
    if sys.stdin is None:
        raise SetupError("Standard input is closed: there is nothing to read.")
    return sys.stdin


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

    Where standard error is not a terminal, the first call writes one line instead.
    """
    if not _is_drawn_on():
        yield _LineOnce(title)
        return
    with ExitStack() as stack:
        bar: list[Callable[[int, int], None]] = []

        def show(done: int, total: int) -> None:
            if not bar:
                bar.append(stack.enter_context(_bar(title)))
            bar[0](done, total)

        yield show


def _is_drawn_on() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    text, left = TextColumn("{task.description}"), TimeRemainingColumn()
    columns = (text, BarColumn(), DownloadColumn(), left)
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _LineOnce:
    """Says once that something has begun, for logs."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._is_said = False

    def __call__(self, done: int, total: int) -> None:
        if not self._is_said:
            print_note(f"{self._title} ({total / 1e6:.0f} MB) ...")
            self._is_said = True


@contextmanager
def spinner(title: str) -> Iterator[None]:
    """Turn a spinner while the block runs; nothing where standard error is not a terminal."""
    if not _is_drawn_on():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(title):
        yield
