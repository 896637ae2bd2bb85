"""Answers of ``POST /v1/messages``: one body, or a stream of named events."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic_core import from_json

from octavo.core.ids import TokenId
from octavo.core.request import FinishReason
from octavo.server.errors import anthropic_body_of
from octavo.server.generation import ChoiceDelta
from octavo.server.job import Job
from octavo.server.ports import Tokenizer
from octavo.server.protocol.chat import ChatRequest
from octavo.server.responses import Collected, Envelope, UsageMeter
from octavo.server.streaming import named_sse
from octavo.server.tools.output import OutputParser
from octavo.server.tools.parts import Call, CallArguments, CallStart, Part, Reasoning, Text

_PIECES: Final = {"text": "text_delta", "thinking": "thinking_delta"}


def messages_body(
    job: Job[ChatRequest], envelope: Envelope, tokenizer: Tokenizer, answer: Collected
) -> dict[str, Any]:
    """Return the body of a whole answer."""
    choice = answer.choices[0]
    message = job.output.read(choice.text, is_cut=choice.finish_reason is FinishReason.LENGTH)
    content: list[dict[str, Any]] = []
    if message.reasoning:
        content.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.text:
        content.append({"type": "text", "text": message.text})
    last = len(message.calls) - 1 if message.in_call else None
    content += [_called(call, cut=i == last) for i, call in enumerate(message.calls)]
    ending = _ending(choice.finish_reason, choice.stop_reason, calls=bool(message.calls))
    return {
        **_message(envelope),
        "content": content,
        **ending,
        "usage": _usage(answer.usage()),
    }


def _called(call: Call, *, cut: bool) -> dict[str, Any]:
    """Return a call; of one that was cut, what clients read from its stream. Arguments that are no
    JSON are the text they are, not those of something else."""
    try:
        arguments = from_json(call.arguments or "{}", allow_partial=cut)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return {"type": "text", "text": f"{call.name} {call.arguments}"}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _message(envelope: Envelope) -> dict[str, Any]:
    return {
        "id": envelope.id,
        "type": "message",
        "role": "assistant",
        "model": envelope.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _ending(
    reason: FinishReason | None, stop: str | TokenId | None, *, calls: bool
) -> dict[str, str | None]:
    sequence = stop if isinstance(stop, str) else None
    if reason is FinishReason.LENGTH:
        name = "max_tokens"
    elif sequence is not None:
        name = "stop_sequence"
    else:
        name = "tool_use" if calls else "end_turn"
    return {"stop_reason": name, "stop_sequence": sequence}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return Anthropic's usage, whose input tokens are those that were not cached."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


class MessageEvents:
    """Turns deltas into events: the message, its blocks one after another, how it ended."""

    def __init__(self, job: Job[ChatRequest], envelope: Envelope, tokenizer: Tokenizer) -> None:
        self._envelope = envelope
        self._parser = OutputParser(job.output)
        self._meter = UsageMeter()
        self._is_open = False
        self._block = -1
        self._kind: str | None = None
        self._has_calls = False

    def opening(self) -> Iterator[bytes]:
        """Return nothing: the message's usage comes with the first delta."""
        return iter(())

    def events(self, item: ChoiceDelta) -> Iterator[bytes]:
        """Return what one delta adds."""
        self._meter.add(item)
        usage = _usage(self._meter.usage())
        if not self._is_open:
            self._is_open = True
            message = {**_message(self._envelope), "usage": {**usage, "output_tokens": 0}}
            yield named_sse({"type": "message_start", "message": message})
        parts = self._parser.push(item.delta.text)
        reason = item.delta.finish_reason
        if reason is not None:
            parts += self._parser.finish(is_cut=reason is FinishReason.LENGTH)
        for part in parts:
            yield from self._part(part)
        if reason is not None:
            yield from self._end_block()
            ending = _ending(reason, item.delta.stop_reason, calls=self._has_calls)
            yield named_sse({"type": "message_delta", "delta": ending, "usage": usage})

    def closing(self) -> Iterator[bytes]:
        """Return the end of the message."""
        yield named_sse({"type": "message_stop"})

    def failure(self, error: Exception) -> bytes:
        """Return Anthropic's error as an event."""
        return named_sse(anthropic_body_of(error))

    def _part(self, part: Part) -> Iterator[bytes]:
        match part:
            case Text(text):
                yield from self._piece("text", text)
            case Reasoning(text):
                yield from self._piece("thinking", text)
            case CallStart(_, call_id, name):
                self._has_calls = True
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                yield from self._begin_block("tool_use", block)
            case CallArguments(_, text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _piece(self, kind: str, text: str) -> Iterator[bytes]:
        if self._kind != kind:
            extra = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin_block(kind, {"type": kind, kind: "", **extra})
        yield self._delta({"type": _PIECES[kind], kind: text})

    def _begin_block(self, kind: str, block: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self._end_block()
        self._block += 1
        self._kind = kind
        yield named_sse(
            {"type": "content_block_start", "index": self._block, "content_block": block}
        )

    def _end_block(self) -> Iterator[bytes]:
        if self._kind is not None:
            self._kind = None
            yield named_sse({"type": "content_block_stop", "index": self._block})

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return named_sse({"type": "content_block_delta", "index": self._block, "delta": delta})
