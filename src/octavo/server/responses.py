"""What both kinds of answers are made of: the envelope, the usage, the parts of a choice."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.core.ids import TokenId
from octavo.core.request import FinishReason, TokenLogprobs
from octavo.server.generation import ChoiceDelta


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every body and chunk of one answer has in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def wrap(self, kind: str, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Return a body of object type ``kind``."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
            **fields,
        }


class UsageMeter:
    """Adds up tokens: each prompt once, however many choices complete it."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._generated: dict[int, int] = {}

    def add(self, item: ChoiceDelta) -> None:
        """Take in a delta."""
        delta = item.delta
        self._generated[item.choice] = delta.num_generated_tokens
        # Later choices share what the first computed; what that one found in the cache counts.
        if delta.index == 0 or item.prompt not in self._prompts:
            self._prompts[item.prompt] = (delta.num_prompt_tokens, delta.num_cached_tokens)

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        num_prompt = sum(prompt for prompt, _ in self._prompts.values())
        num_generated = sum(self._generated.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {
                "cached_tokens": sum(cached for _, cached in self._prompts.values())
            },
        }


@dataclass(slots=True)
class CollectedChoice:
    """One whole choice, put together from its deltas."""

    prompt: int
    pieces: list[tuple[str, tuple[TokenLogprobs, ...]]] = field(default_factory=list)
    """Texts as they came, and the logprobs that came with them."""
    token_ids: list[TokenId] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | TokenId | None = None

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(text for text, _ in self.pieces)

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The logprobs of all tokens; none if they were not asked for."""
        return [item for _, logprobs in self.pieces for item in logprobs]


class Collected:
    """A whole answer, put together from its deltas."""

    def __init__(self, num_choices: int, num_prompts: int) -> None:
        per_prompt = num_choices // num_prompts
        self.choices = [CollectedChoice(index // per_prompt) for index in range(num_choices)]
        self.prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = {}
        self.embeddings: dict[int, tuple[float, ...]] = {}
        self._meter = UsageMeter()

    def add(self, item: ChoiceDelta) -> None:
        """Take in a delta."""
        self._meter.add(item)
        if item.delta.embedding is not None:
            self.embeddings[item.prompt] = item.delta.embedding
        choice, delta = self.choices[item.choice], item.delta
        choice.pieces.append((delta.text, delta.logprobs))
        choice.token_ids += delta.token_ids
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs[item.prompt] = delta.prompt_logprobs
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        return self._meter.usage()


class ChunkWriter(Protocol):
    """Turns the deltas of one answer into the chunks of its stream."""

    def opening(self) -> Iterable[Mapping[str, Any]]:
        """Return what comes before any delta."""

    def chunks(self, item: ChoiceDelta) -> Iterable[Mapping[str, Any]]:
        """Return what one delta adds: none, if its text is held back, or several chunks."""

    def usage(self, usage: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the chunk without choices that holds the usage."""
