"""What the server needs of an engine: the faces it is written against."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from octavo.core.events import SchedulerStats
from octavo.core.ids import TokenId
from octavo.core.request import DEFAULT_RETENTION, Retention
from octavo.core.sampling import SamplingParams
from octavo.engine.outputs import GenerationDelta, ModelInfo


class ChatTemplate(Protocol):
    """Turns a conversation into the text that the model was trained on."""

    @property
    def text(self) -> str:
        """The template itself, to see what it knows of (tools, reasoning)."""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """Return the prompt's text; InvalidRequestError if the messages do not fit."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a document, if there is one."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Ids that end a turn or a document."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Control tokens, which usually leave no text."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[TokenId]:
        """Return the text's token ids."""

    def decode(self, token_ids: Sequence[TokenId], *, skip_special_tokens: bool = False) -> str:
        """Return the text of all the ids together."""

    def token_bytes(self, token_id: TokenId) -> bytes:
        """Return the bytes that a token adds to the text."""


class Engine(Protocol):
    """Serves completions; ``octavo.engine.async_engine.AsyncEngine`` is the real one."""

    @property
    def info(self) -> ModelInfo:
        """What is served, and its limits."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def is_running(self) -> bool:
        """Whether it can serve."""

    def start(self) -> None:
        """Begin to serve, on the running event loop."""

    def shutdown(self) -> None:
        """Stop; live completions end with an error."""

    def stats(self) -> SchedulerStats:
        """Return the scheduler's gauges and totals, as of now."""

    async def set_eviction_policy(self, name: str) -> None:
        """Switch the KV cache's eviction policy; InvalidRequestError if there is no such one."""

    def generate(
        self,
        prompt_token_ids: Sequence[TokenId],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        retention: Retention = DEFAULT_RETENTION,
    ) -> AsyncGenerator[GenerationDelta, None]:
        """Yield deltas of ``sampling.n`` completions; closing it aborts what is unfinished."""
