"""What the commands that run peers have in common."""

import argparse
import signal
import sys
from collections.abc import Iterable

from variants import PEER_VARIANTS


def say(text: str) -> None:
    """Tell the person who waits; results go to standard output, this does not."""
    print(text, file=sys.stderr, flush=True)


def unwind_on_sigterm() -> None:
    """Let SIGTERM raise, so that workers end too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def check_peers(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """End the command in a sentence if a name is neither a peer's nor a variant's."""
    known = {name for variant in PEER_VARIANTS for name in (variant.name, variant.peer)}
    if unknown := sorted(set(names) - known):
        parser.error(f"there is no peer {unknown[0]!r}; known are {', '.join(sorted(known))}")
