"""Answers of ``POST /v1/responses``: one body, or a stream of named events."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from octavo.core.request import FinishReason
from octavo.server.errors import body_of
from octavo.server.generation import ChoiceDelta
from octavo.server.job import Job
from octavo.server.logprobs import entries
from octavo.server.ports import Tokenizer
from octavo.server.responses import Collected, Envelope, UsageMeter
from octavo.server.responses_api.output_items import OutputItems
from octavo.server.responses_api.protocol import ResponsesRequest
from octavo.server.streaming import named_sse
from octavo.server.tools.output import OutputParser

Event = dict[str, Any]


def response_body(
    job: Job[ResponsesRequest], envelope: Envelope, tokenizer: Tokenizer, answer: Collected
) -> dict[str, Any]:
    """Return the body of a whole answer."""
    choice = answer.choices[0]
    items = OutputItems(envelope.id)
    parser = OutputParser(job.output)
    for text, logprobs in choice.pieces:
        items.score(entries(tokenizer, logprobs))
        for part in parser.push(text):
            list(items.add(part))
    for part in parser.finish(is_cut=choice.finish_reason is FinishReason.LENGTH):
        list(items.add(part))
    list(items.end(complete=choice.finish_reason is FinishReason.STOP))
    response = Response(job, envelope, tokenizer)
    return response.ended(items, choice.finish_reason, answer.usage())


class Response:
    """The response object, in whatever state it is."""

    def __init__(
        self, job: Job[ResponsesRequest], envelope: Envelope, tokenizer: Tokenizer
    ) -> None:
        self._request = job.request
        self._envelope = envelope
        self._tokenizer = tokenizer

    def begun(self) -> Event:
        """Return it before anything was answered."""
        return self._wrap("in_progress", output=[])

    def ended(
        self, items: OutputItems, reason: FinishReason | None, usage: Mapping[str, Any]
    ) -> Event:
        """Return it as a whole."""
        cut = reason is FinishReason.LENGTH
        return self._wrap(
            "incomplete" if cut else "completed",
            output=items.items,
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            usage=self._usage(items, usage),
        )

    def failed(self, items: OutputItems, message: str) -> Event:
        """Return it as far as it came."""
        return self._wrap(
            "failed", output=items.items, error={"code": "server_error", "message": message}
        )

    def _wrap(self, status: str, **fields: Any) -> Event:
        request, envelope = self._request, self._envelope
        choice = request.tool_choice
        effort = None if request.reasoning is None else request.reasoning.effort
        return {
            "id": envelope.id,
            "object": "response",
            "created_at": envelope.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "model": envelope.model,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": _format(request)},
            "tool_choice": choice.model_dump() if isinstance(choice, BaseModel) else choice,
            "tools": [tool.model_dump() for tool in request.tools],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            **fields,
        }

    def _usage(self, items: OutputItems, usage: Mapping[str, Any]) -> dict[str, Any]:
        thought = items.reasoning
        num_thought = (
            len(self._tokenizer.encode(thought, add_special_tokens=False)) if thought else 0
        )
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_thought},
            "total_tokens": usage["total_tokens"],
        }


def _format(request: ResponsesRequest) -> Event:
    form = None if request.text is None else request.text.format
    if form is None:
        return {"type": "text"}
    return form.model_dump(by_alias=True, exclude_none=True)


class ResponseEvents:
    """Turns deltas into events: items and their parts, each begun, added to and ended."""

    def __init__(
        self, job: Job[ResponsesRequest], envelope: Envelope, tokenizer: Tokenizer
    ) -> None:
        self._response = Response(job, envelope, tokenizer)
        self._items = OutputItems(envelope.id)
        self._tokenizer = tokenizer
        self._parser = OutputParser(job.output)
        self._meter = UsageMeter()
        self._number = 0

    def opening(self) -> Iterator[bytes]:
        """Return that the response exists and is being computed."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event({"type": kind, "response": self._response.begun()})

    def events(self, item: ChoiceDelta) -> Iterator[bytes]:
        """Return what one delta adds."""
        self._meter.add(item)
        reason = item.delta.finish_reason
        self._items.score(entries(self._tokenizer, item.delta.logprobs))
        parts = self._parser.push(item.delta.text)
        if reason is not None:
            parts += self._parser.finish(is_cut=reason is FinishReason.LENGTH)
        for part in parts:
            yield from map(self._event, self._items.add(part))
        if reason is not None:
            complete = reason is FinishReason.STOP
            yield from map(self._event, self._items.end(complete=complete))
            response = self._response.ended(self._items, reason, self._meter.usage())
            yield self._event({"type": f"response.{response['status']}", "response": response})

    def closing(self) -> Iterator[bytes]:
        """Return nothing: the last event says that it is the last."""
        return iter(())

    def failure(self, error: Exception) -> bytes:
        """Return the response that failed, as an event."""
        message = body_of(error)["error"]["message"]
        return self._event(
            {"type": "response.failed", "response": self._response.failed(self._items, message)}
        )

    def _event(self, event: Event) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_sse({**event, "sequence_number": number})
