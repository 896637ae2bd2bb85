"""The output of a response: items that grow one after another, and the events that say so."""

from collections.abc import Iterator
from typing import Any, Final

from octavo.server.tools.parts import CallArguments, CallStart, Part, Reasoning, Text

Event = dict[str, Any]

_PREFIXES: Final = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
_TEXTS: Final = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class OutputItems:
    """Builds the items of one response out of the parts of its answer."""

    def __init__(self, response_id: str) -> None:
        self._suffix = response_id.partition("_")[2]
        self._open: dict[str, Any] | None = None
        self._pieces: list[str] = []
        self._thoughts: list[str] = []
        self.items: list[dict[str, Any]] = []

    @property
    def reasoning(self) -> str:
        """All of the reasoning."""
        return "".join(self._thoughts)

    def add(self, part: Part) -> Iterator[Event]:
        """Take in a part; yield what that changes."""
        match part:
            case Text(text):
                yield from self._add_text("message", text)
            case Reasoning(text):
                self._thoughts.append(text)
                yield from self._add_text("reasoning", text)
            case CallStart(_, call_id, name):
                fields = {"call_id": call_id, "name": name, "arguments": ""}
                yield from self._begin("function_call", fields)
            case CallArguments(_, text):
                self._pieces.append(text)
                yield self._at("response.function_call_arguments.delta", delta=text)

    def end(self, *, complete: bool) -> Iterator[Event]:
        """End the item that is open; one that was cut short is incomplete."""
        item, self._open = self._open, None
        if item is None:
            return
        text = "".join(self._pieces)
        self._pieces.clear()
        where: Event = {"item_id": item["id"], "output_index": len(self.items)}
        if item["type"] == "function_call":
            item["arguments"] = text
            kind = "response.function_call_arguments.done"
            yield {"type": kind, **where, "name": item["name"], "arguments": text}
        else:
            where["content_index"] = 0
            scores = _logprobs(item["type"])
            yield {"type": f"{_TEXTS[item['type']]}.done", **where, "text": text, **scores}
            part = _content(item["type"], text)
            item["content"] = [part]
            yield {"type": "response.content_part.done", **where, "part": part}
        item["status"] = "completed" if complete else "incomplete"
        index = len(self.items)
        self.items.append(item)
        yield {"type": "response.output_item.done", "output_index": index, "item": dict(item)}

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            fields: Event = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._begin(kind, {**fields, "content": []})
            yield self._at("response.content_part.added", content_index=0, part=_content(kind, ""))
        self._pieces.append(text)
        scores = _logprobs(kind)
        yield self._at(f"{_TEXTS[kind]}.delta", content_index=0, delta=text, **scores)

    def _begin(self, kind: str, fields: dict[str, Any]) -> Iterator[Event]:
        yield from self.end(complete=True)
        index = len(self.items)
        name = f"{_PREFIXES[kind]}_{self._suffix}{index}"
        self._open = {"id": name, "type": kind, "status": "in_progress", **fields}
        added = dict(self._open)
        yield {"type": "response.output_item.added", "output_index": index, "item": added}

    def _at(self, kind: str, **fields: Any) -> Event:
        """Return an event about the item that is open."""
        assert self._open is not None
        return {
            "type": kind,
            "item_id": self._open["id"],
            "output_index": len(self.items),
            **fields,
        }


def _logprobs(kind: str) -> Event:
    """Return what the specification wants with text; logprobs are not offered here."""
    return {"logprobs": []} if kind == "message" else {}


def _content(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
