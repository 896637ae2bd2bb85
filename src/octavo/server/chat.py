"""Answers of ``POST /v1/chat/completions``: one body, or a stream of chunks."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from octavo.core.request import FinishReason
from octavo.engine.outputs import GenerationDelta
from octavo.server import logprobs as formats
from octavo.server.generation import ChoiceDelta
from octavo.server.job import Job
from octavo.server.ports import Tokenizer
from octavo.server.protocol.chat import ChatRequest
from octavo.server.responses import Collected, Envelope
from octavo.server.streaming import ChunkEvents
from octavo.server.tools.output import OutputParser
from octavo.server.tools.parts import (
    CallArguments,
    CallStart,
    Message,
    Part,
    Reasoning,
    Text,
)

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
        message = job.output.read(choice.text, is_cut=choice.finish_reason is FinishReason.LENGTH)
        body: dict[str, Any] = {
            "index": index,
            "message": _message(message),
            "logprobs": scores,
            "finish_reason": reason_of(
                choice.finish_reason, calls=bool(message.calls) and not message.in_call
            ),
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


def _message(message: Message) -> dict[str, Any]:
    """Return the assistant's message; content is null where there are only calls."""
    content = None if message.calls and not message.text else message.text
    fields: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return fields


def reason_of(reason: FinishReason | None, *, calls: bool) -> str | None:
    """Return OpenAI's finish reason: whole calls end an answer that was not cut short."""
    return "tool_calls" if calls and reason is FinishReason.STOP else reason


def chat_events(job: Job[ChatRequest], envelope: Envelope, tokenizer: Tokenizer) -> ChunkEvents:
    """Return what writes the answer as a stream."""
    return ChunkEvents(ChatChunks(job, envelope, tokenizer), include_usage=job.request.wants_usage)


class ChatChunks:
    """Turns deltas into chunks: the role first, then text, then an empty delta that ends it."""

    def __init__(self, job: Job[ChatRequest], envelope: Envelope, tokenizer: Tokenizer) -> None:
        self._job = job
        self._request = job.request
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._parsers = [OutputParser(job.output) for _ in range(job.num_choices)]
        self._has_calls = [False] * job.num_choices
        self._usage: dict[str, Any] = {"usage": None} if job.request.wants_usage else {}

    def opening(self) -> Iterator[Mapping[str, Any]]:
        """Return each choice's role."""
        for index in range(self._job.num_choices):
            choice = _choice(index, {"role": "assistant", "content": "", "refusal": None})
            fields = dict(self._usage)
            if self._request.return_token_ids:
                fields["prompt_token_ids"] = self._job.prompts[0].token_ids
            yield self._envelope.wrap(CHUNK_OBJECT, [choice], **fields)

    def chunks(self, item: ChoiceDelta) -> Iterator[Mapping[str, Any]]:
        """Return what one delta adds: a chunk for each part that was found in it."""
        delta, index = item.delta, item.choice
        parts = self._parsers[index].push(delta.text)
        if delta.finish_reason is not None:
            parts += self._parsers[index].finish(is_cut=delta.finish_reason is FinishReason.LENGTH)
        self._has_calls[index] |= any(isinstance(part, CallStart) for part in parts)
        additions = [_addition(part) for part in parts]
        shown = self._with_tokens(delta)
        if not additions and shown:
            additions = [{"content": ""}]
        for addition in additions:
            yield self._envelope.wrap(
                CHUNK_OBJECT, [{**_choice(index, addition), **shown}], **self._usage
            )
            shown = {}
        if delta.finish_reason is not None:
            choice = _choice(index, {})
            calls = self._has_calls[index] and not self._parsers[index].in_call
            choice["finish_reason"] = reason_of(delta.finish_reason, calls=calls)
            choice["stop_reason"] = delta.stop_reason
            yield self._envelope.wrap(CHUNK_OBJECT, [choice], **self._usage)

    def _with_tokens(self, delta: GenerationDelta) -> dict[str, Any]:
        """Return what a delta's tokens add to its first chunk."""
        fields: dict[str, Any] = {}
        if self._request.logprobs and delta.logprobs:
            fields["logprobs"] = formats.chat_logprobs(self._tokenizer, delta.logprobs)
        if self._request.return_token_ids and delta.token_ids:
            fields["token_ids"] = delta.token_ids
        return fields

    def usage(self, usage: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the chunk that holds the usage."""
        return self._envelope.wrap(CHUNK_OBJECT, [], usage=usage)


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _addition(part: Part) -> dict[str, Any]:
    """Return what a part adds to the message, as a chunk's ``delta``."""
    match part:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
