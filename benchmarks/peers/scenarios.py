"""What is asked of every engine, and the token ids it is asked with."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from octavo.models.checkpoint import open_checkpoint
from octavo.models.tokenizer import load_tokenizer

REPOSITORY: Final = Path(__file__).resolve().parents[2]
SALT_TOKENS: Final = 4
SALT_IDS: Final = range(1000, 40_000)
"""Ordinary tokens of the default model's vocabulary."""

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests that are sent together, and which figure they give."""

    name: str
    prompt_lengths: tuple[int, ...]
    max_tokens: int
    figure: Literal["decode", "prefill", "wall"]
    """``decode``: tokens per second while all requests decode; ``prefill``: prompt tokens per
    second until all first tokens; ``wall``: seconds."""

    @property
    def max_len(self) -> int:
        """Most tokens of a prompt and its output."""
        return max(self.prompt_lengths) + self.max_tokens

    @property
    def unit(self) -> str:
        """Unit of the figure."""
        return "s" if self.figure == "wall" else "tokens/s"

    def ratio(self, octavo: float, other: float) -> float:
        """Return how many times faster Octavo is."""
        return other / octavo if self.figure == "wall" else octavo / other

    def value(self, wall_s: float, times_s: Sequence[Sequence[float]] | None) -> float:
        """Return the figure of a run; ``times_s``, when each token came, is for ``decode``."""
        if self.figure == "wall":
            return wall_s
        if self.figure == "prefill":
            return sum(self.prompt_lengths) / wall_s
        assert times_s is not None, "decode figures are of streamed runs"
        return decode_rate(times_s)


def decode_rate(times_s: Sequence[Sequence[float]]) -> float:
    """Return tokens per second from when every request has its first token until one has its last.

    Where some end before others begin, until all have their last.
    """
    start = max(own[0] for own in times_s)
    stop = min(own[-1] for own in times_s)
    if stop <= start:
        stop = max(own[-1] for own in times_s)
    decoded = sum(start < time <= stop for own in times_s for time in own)
    return decoded / (stop - start)


def _batch(size: int) -> Scenario:
    return Scenario(f"batch-{size}", (128,) * size, 64, "wall")


LONG: Final = 7936
"""With 64 tokens of output, close to the default model's 8,192."""

SCENARIOS: Final = {
    scenario.name: scenario
    for scenario in (
        Scenario("decode-1", (128,), 128, "decode"),
        _batch(8),
        _batch(32),
        _batch(64),
        Scenario("prefill-1k", (1024,) * 4, 1, "prefill"),
        Scenario("decode-2k", (2048,), 64, "decode"),
        Scenario("decode-8k", (LONG,), 64, "decode"),
        Scenario("mixed", (LONG, *(128,) * 31), 64, "decode"),
        Scenario("prefill-8k", (LONG,), 1, "prefill"),
        Scenario("smoke", (64, 48), 16, "wall"),
    )
}
GROUPS: Final = {
    "default": ("decode-1", "batch-8", "batch-32", "batch-64", "prefill-1k"),
    "long": ("decode-2k", "decode-8k", "mixed", "prefill-8k"),
    "smoke": ("smoke",),
}


def chosen(names: Sequence[str]) -> list[Scenario]:
    """Return scenarios by their names and their groups' names.

    Raises:
        KeyError: there is no such name.
    """
    flat = [name for item in names for name in GROUPS.get(item, (item,))]
    return [SCENARIOS[name] for name in dict.fromkeys(flat)]


class PromptMaker:
    """Cuts prompts of given lengths from the repository's own documents.

    Each begins with a few random tokens, so that no prefix cache has seen it.
    """

    def __init__(self, model: Path, seed: int = 0) -> None:
        tokenizer = load_tokenizer(open_checkpoint(model).tokenizer_source)
        texts = [path.read_text() for path in sorted(REPOSITORY.glob("*.md"))]
        texts += [path.read_text() for path in sorted(REPOSITORY.glob("src/octavo/*/*.py"))]
        self._text = tokenizer.encode("\n".join(texts), add_special_tokens=False)
        self._random = random.Random(seed)

    def prompts(self, scenario: Scenario) -> list[Prompt]:
        """Return one prompt a request, of exactly the lengths asked for."""
        return [self._prompt(length) for length in scenario.prompt_lengths]

    def _prompt(self, length: int) -> Prompt:
        salt = self._random.choices(SALT_IDS, k=SALT_TOKENS)
        start = self._random.randrange(len(self._text) - length)
        return [*salt, *self._text[start : start + length - SALT_TOKENS]]
