"""Offline generation: prompts in, all their completions out, as vLLM users know it."""

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.core.errors import InvalidRequestError, InvariantError
from octavo.core.events import NullObserver
from octavo.core.ids import RequestId, TokenId
from octavo.core.request import TokenLogprobs
from octavo.core.sampling import Pooling, SamplingParams
from octavo.engine.factory import EngineParts, EngineSettings, build_engine
from octavo.engine.interrupts import HeldInterrupts, held_interrupts
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    GenerationDelta,
    RequestOutput,
    scaled,
)
from octavo.engine.progress import Progress, progress_bar
from octavo.models.source import default_cache_dir, packed_cache_dir, resolve_model
from octavo.runner.grammar import CompiledGrammar

Prompt = str | Sequence[TokenId]
Message = Mapping[str, Any]


class LLM:
    """A model and its engine, driven by the caller's thread.

    Calls from several threads take turns. Ctrl-C ends a call after the step it is in and leaves
    the engine as good as new.

    ``settings`` are the fields of ``EngineSettings``, such as ``max_model_len=2048``. Packed
    weights are kept in the user's cache folder, unless ``packed_cache_dir=None``.

    >>> llm = LLM("smollm2")                                                  # doctest: +SKIP
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0.0))
    """

    def __init__(self, model: str | Path = "smollm2", **settings: Any) -> None:
        source = resolve_model(str(model), cache_dir=default_cache_dir())
        settings.setdefault("served_model_name", source.served_name)
        settings.setdefault("packed_cache_dir", packed_cache_dir(default_cache_dir()))
        self._parts: EngineParts = build_engine(
            EngineSettings(model=source.path, **settings), NullObserver()
        )
        self._ids = itertools.count()
        self._turn = threading.Lock()

    @property
    def parts(self) -> EngineParts:
        """The engine itself, its tokenizer and what it serves."""
        return self._parts

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt (text or token ids) and return the results in their order.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing was computed then.
        """
        batch = _as_prompts(prompts)
        params = _one_each(sampling_params, len(batch))
        tokens = [self._encode(prompt) for prompt in batch]
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        return self._run(texts, tokens, params, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template.

        Raises:
            RequestError: the messages do not fit the template, or the model has none.
        """
        variables = dict(chat_template_kwargs or {})
        if taken := variables.keys() & {"add_generation_prompt", "tools"}:
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {', '.join(sorted(taken))}.",
                param="chat_template_kwargs",
            )
        talks = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [
            self._parts.tokenizer.render_chat(
                talk,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
            for talk in talks
        ]
        encode = self._parts.tokenizer.encode
        tokens = [encode(text, add_special_tokens=False) for text in texts]
        params = _one_each(sampling_params, len(texts))
        return self._run(texts, tokens, params, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """Turn each prompt (text or token ids) into a vector, as ``POST /v1/embeddings`` does.

        Args:
            prompts: one or several.
            pooling: the state of the last token, or the mean over all.
            normalize: whether vectors are scaled to length 1.
            use_tqdm: whether progress is shown.

        Raises:
            RequestError: a prompt is wrong; nothing was computed then.
        """
        batch = _as_prompts(prompts)
        params = [SamplingParams(max_tokens=0, pooling=pooling)] * len(batch)
        tokens = [self._encode(prompt) for prompt in batch]
        run, names = self._finish(tokens, params, use_tqdm=use_tqdm)
        return [
            EmbeddingOutput(name, tuple(prompt), run.embedding(name, normalize=normalize))
            for name, prompt in zip(names, tokens, strict=True)
        ]

    def _encode(self, prompt: Prompt) -> Sequence[TokenId]:
        return self._parts.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _run(
        self,
        texts: Sequence[str | None],
        tokens: Sequence[Sequence[TokenId]],
        params: Sequence[SamplingParams],
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        run, names = self._finish(tokens, params, use_tqdm=use_tqdm)
        return [
            run.result(name, text, prompt)
            for name, text, prompt in zip(names, texts, tokens, strict=True)
        ]

    def _finish(
        self,
        tokens: Sequence[Sequence[TokenId]],
        params: Sequence[SamplingParams],
        *,
        use_tqdm: bool,
    ) -> tuple["_Run", list[str]]:
        """Run all prompts to their ends; return the run and their names in it."""
        run = _Run(self._parts)
        names = [f"offline-{next(self._ids)}" for _ in tokens]
        with self._turn, held_interrupts() as held:
            for prompt, sampling, name in zip(tokens, params, names, strict=True):
                run.add(prompt, sampling, name)
            with progress_bar("Processed prompts", len(tokens), show=use_tqdm) as bar:
                run.finish(bar, held)
        return run, names


class _Run:
    """One call of ``generate``: what was sent and what has come back."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._processor = OutputProcessor(parts.tokenizer, NullObserver())
        self._deltas: dict[str, list[GenerationDelta]] = {}
        self._live: set[RequestId] = set()
        self._grammars: list[CompiledGrammar] = []

    def add(self, prompt: Sequence[TokenId], sampling: SamplingParams, name: str) -> None:
        try:
            if sampling.structured_output is not None and self._parts.grammars is not None:
                self._grammars.append(self._parts.grammars.compile(sampling.structured_output))
            request = self._parts.requests.build(prompt, sampling, request_id=name)
        except Exception:
            self._abort()
            raise
        self._deltas[name] = []
        self._live.add(request.request_id)
        self._processor.add(request)
        self._parts.core.add(request)

    def finish(self, bar: Progress, held: HeldInterrupts) -> None:
        core = self._parts.core
        try:
            while len(self._processor):
                held.check()
                update = core.step()
                for done in self._processor.process(update.outputs):
                    self._deltas[done.request_id] += done.deltas
                    if done.stopped_after is not None:
                        stats = core.finish(done.request_id, done.stopped_after, done.index)
                        self._settle([stats] if stats is not None else [], bar)
                self._settle(update.finished, bar)
        finally:
            self._abort()

    def result(self, name: str, text: str | None, prompt: Sequence[TokenId]) -> RequestOutput:
        deltas = self._deltas[name]
        scored = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
        indexes = sorted({delta.index for delta in deltas})
        return RequestOutput(
            request_id=name,
            prompt=text,
            prompt_token_ids=tuple(prompt),
            outputs=tuple(_join([d for d in deltas if d.index == index]) for index in indexes),
            num_cached_tokens=max(delta.num_cached_tokens for delta in deltas),
            prompt_logprobs=scored[0] if scored else None,
        )

    def embedding(self, name: str, *, normalize: bool) -> tuple[float, ...]:
        [last] = self._deltas[name]
        if last.error is not None:
            raise last.error
        if last.embedding is None:
            raise InvariantError("a pooled prompt has no embedding")
        return scaled(last.embedding) if normalize else last.embedding

    def _settle(self, finished: Iterable[Any], bar: Progress) -> None:
        for request_id in self._processor.settle(finished):
            self._live.discard(request_id)
            bar.advance()

    def _abort(self) -> None:
        """Leave nothing behind when the caller interrupts or a later prompt is refused."""
        for request_id in self._live:
            self._parts.core.abort(request_id)
            self._processor.drop(request_id)
        self._live.clear()


def _join(deltas: Sequence[GenerationDelta]) -> CompletionOutput:
    last = deltas[-1]
    logprobs: list[TokenLogprobs] = [item for delta in deltas for item in delta.logprobs]
    if last.error is not None:
        raise last.error
    if last.finish_reason is None:
        raise InvariantError("a completion ended without a reason")
    return CompletionOutput(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(logprobs) if logprobs else None,
    )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"There are {count} prompts but {len(params)} sampling_params: give one for all, "
            "or one each.",
            param="sampling_params",
        )
    return list(params)
