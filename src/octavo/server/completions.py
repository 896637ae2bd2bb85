"""Answers of ``POST /v1/completions``: one body, or a stream of chunks."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

from octavo.core.request import TokenLogprobs
from octavo.server import logprobs as formats
from octavo.server.generation import ChoiceDelta
from octavo.server.job import Job
from octavo.server.ports import Tokenizer
from octavo.server.protocol.completions import CompletionRequest
from octavo.server.responses import Collected, CollectedChoice, Envelope
from octavo.server.streaming import ChunkEvents

OBJECT: Final = "text_completion"
PromptScores = tuple[TokenLogprobs | None, ...]


def completion_body(
    job: Job[CompletionRequest], envelope: Envelope, tokenizer: Tokenizer, answer: Collected
) -> dict[str, Any]:
    """Return the body of a whole answer."""
    choices = []
    for index, choice in enumerate(answer.choices):
        scores = answer.prompt_logprobs.get(choice.prompt)
        choices.append(_whole_choice(job, index, tokenizer, choice, scores))
    return envelope.wrap(OBJECT, choices, usage=answer.usage())


def _whole_choice(
    job: Job[CompletionRequest],
    index: int,
    tokenizer: Tokenizer,
    choice: CollectedChoice,
    scores: PromptScores | None,
) -> dict[str, Any]:
    request, prompt = job.request, job.prompts[choice.prompt]
    body: dict[str, Any] = {
        "index": index,
        "text": (prompt.text if request.echo else "") + choice.text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if request.logprobs is not None:
        echoed_ids = prompt.token_ids if request.echo else ()
        echoed = (scores or ()) if request.echo else ()
        pieces = _pieces(request, tokenizer)
        body["logprobs"] = pieces.piece(
            (*echoed_ids, *choice.token_ids), (*echoed, *choice.logprobs)
        )
    if request.prompt_logprobs is not None and scores is not None:
        body["prompt_logprobs"] = formats.prompt_logprobs(
            tokenizer, scores, request.prompt_logprobs
        )
    if request.return_token_ids:
        body["prompt_token_ids"] = list(prompt.token_ids)
        body["token_ids"] = choice.token_ids
    return body


def _pieces(request: CompletionRequest, tokenizer: Tokenizer) -> formats.CompletionLogprobs:
    return formats.CompletionLogprobs(
        tokenizer, request.logprobs or 0, skip_special_tokens=request.skip_special_tokens
    )


def completion_events(
    job: Job[CompletionRequest], envelope: Envelope, tokenizer: Tokenizer
) -> ChunkEvents:
    """Return what writes the answer as a stream."""
    return ChunkEvents(
        CompletionChunks(job, envelope, tokenizer), include_usage=job.request.wants_usage
    )


class CompletionChunks:
    """Turns deltas into chunks.

    A choice's first chunk holds its echoed prompt. Where the prompt's logprobs are echoed too,
    they come with the first choice, and the other choices' deltas wait for them.
    """

    def __init__(
        self, job: Job[CompletionRequest], envelope: Envelope, tokenizer: Tokenizer
    ) -> None:
        self._job = job
        self._request = job.request
        self._envelope = envelope
        self._pieces = [_pieces(job.request, tokenizer) for _ in range(job.num_choices)]
        self._opened: set[int] = set()
        self._scores: dict[int, PromptScores] = {}
        self._held: defaultdict[int, list[ChoiceDelta]] = defaultdict(list)
        self._usage: dict[str, Any] = {"usage": None} if job.request.wants_usage else {}

    def opening(self) -> Iterator[Mapping[str, Any]]:
        """Return what comes before any delta: nothing."""
        return iter(())

    def chunks(self, item: ChoiceDelta) -> Iterator[Mapping[str, Any]]:
        """Return what one delta adds."""
        if not (self._request.echo and self._request.logprobs is not None):
            yield from self._write(item)
            return
        if item.delta.prompt_logprobs is not None:
            self._scores[item.prompt] = item.delta.prompt_logprobs
        self._held[item.prompt].append(item)
        if item.prompt in self._scores:
            for held in self._held.pop(item.prompt):
                yield from self._write(held)

    def usage(self, usage: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the chunk that holds the usage."""
        return self._envelope.wrap(OBJECT, [], usage=usage)

    def _write(self, item: ChoiceDelta) -> Iterator[Mapping[str, Any]]:
        if item.choice not in self._opened:
            self._opened.add(item.choice)
            yield from self._first(item)
        delta = item.delta
        if delta.text or delta.logprobs or (self._request.return_token_ids and delta.token_ids):
            scores = None
            if self._request.logprobs is not None:
                scores = self._pieces[item.choice].piece(delta.token_ids, delta.logprobs)
            ids = {"token_ids": delta.token_ids} if self._request.return_token_ids else {}
            yield self._chunk(item.choice, delta.text, scores, **ids)
        if delta.finish_reason is not None:
            yield self._chunk(
                item.choice,
                "",
                None,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )

    def _first(self, item: ChoiceDelta) -> Iterator[Mapping[str, Any]]:
        """Return what a choice begins with: its echoed prompt and the prompt's token ids."""
        prompt, scores = self._job.prompts[item.prompt], None
        if self._request.echo and self._request.logprobs is not None:
            scores = self._pieces[item.choice].piece(prompt.token_ids, self._scores[item.prompt])
        ids = {"prompt_token_ids": prompt.token_ids} if self._request.return_token_ids else {}
        if self._request.echo or ids:
            yield self._chunk(item.choice, prompt.text if self._request.echo else "", scores, **ids)

    def _chunk(
        self, index: int, text: str, scores: Mapping[str, Any] | None, **fields: Any
    ) -> Mapping[str, Any]:
        choice = {"index": index, "text": text, "logprobs": scores, "finish_reason": None}
        return self._envelope.wrap(OBJECT, [choice | fields], **self._usage)
