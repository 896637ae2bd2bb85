"""Answers of ``POST /v1/chat/completions``: one body, or a stream of chunks."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from octavo.server import logprobs as formats
from octavo.server.generation import ChoiceDelta
from octavo.server.ports import Tokenizer
from octavo.server.protocol.chat import ChatRequest
from octavo.server.responses import Collected, Envelope
from octavo.server.translate import Job

OBJECT: Final = "chat.completion"
CHUNK_OBJECT: Final = "chat.completion.chunk"


def chat_body(
    job: Job[ChatRequest], envelope: Envelope, tokenizer: Tokenizer, answer: Collected
) -> dict[str, Any]:
    """Return the body of a whole answer."""
    request = job.request
    fields: dict[str, Any] = {}
    choices = []
    for index, choice in enumerate(answer.choices):
        scores = formats.chat_logprobs(tokenizer, choice.logprobs) if request.logprobs else None
        body: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": scores,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if request.return_token_ids:
            body["token_ids"] = choice.token_ids
        choices.append(body)
    if request.return_token_ids:
        fields["prompt_token_ids"] = list(job.prompts[0].token_ids)
    scored = answer.prompt_logprobs.get(0)
    if request.prompt_logprobs is not None and scored is not None:
        num_top = request.prompt_logprobs
        fields["prompt_logprobs"] = formats.prompt_logprobs(tokenizer, scored, num_top)
    return envelope.wrap(OBJECT, choices, usage=answer.usage(), **fields)


class ChatChunks:
    """Turns deltas into chunks: the role first, then text, then an empty delta that ends it."""

    def __init__(self, job: Job[ChatRequest], envelope: Envelope, tokenizer: Tokenizer) -> None:
        self._job = job
        self._request = job.request
        self._envelope = envelope
        self._tokenizer = tokenizer
        options = job.request.stream_options
        self._usage: dict[str, Any] = (
            {"usage": None} if options is not None and options.include_usage else {}
        )

    def opening(self) -> Iterator[Mapping[str, Any]]:
        """Return each choice's role."""
        for index in range(self._job.num_choices):
            choice = _choice(index, {"role": "assistant", "content": "", "refusal": None})
            fields = dict(self._usage)
            if self._request.return_token_ids:
                fields["prompt_token_ids"] = self._job.prompts[0].token_ids
            yield self._envelope.wrap(CHUNK_OBJECT, [choice], **fields)

    def chunks(self, item: ChoiceDelta) -> Iterator[Mapping[str, Any]]:
        """Return what one delta adds."""
        delta = item.delta
        if delta.text or delta.logprobs or (self._request.return_token_ids and delta.token_ids):
            choice = _choice(item.choice, {"content": delta.text})
            if self._request.logprobs:
                choice["logprobs"] = formats.chat_logprobs(self._tokenizer, delta.logprobs)
            if self._request.return_token_ids:
                choice["token_ids"] = delta.token_ids
            yield self._envelope.wrap(CHUNK_OBJECT, [choice], **self._usage)
        if delta.finish_reason is not None:
            choice = _choice(item.choice, {})
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
            yield self._envelope.wrap(CHUNK_OBJECT, [choice], **self._usage)

    def usage(self, usage: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the chunk that holds the usage."""
        return self._envelope.wrap(CHUNK_OBJECT, [], usage=usage)


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
