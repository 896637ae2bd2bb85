"""The output of a response: items that grow one after another, and the events that say so."""

from collections.abc import Iterator, Sequence
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
        self._unplaced: list[Event] = []  # logprobs of tokens whose text is not in an item yet
        self._scores: list[Event] = []  # those of the message that is open
        self.items: list[dict[str, Any]] = []

    @property
    def reasoning(self) -> str:
        """All of the reasoning."""
        return "".join(self._thoughts)

    def score(self, logprobs: Sequence[Event]) -> None:
        """Take in the logprobs of tokens; call before adding the parts that they brought.

        Each goes to the text that is added next. Those of marks, calls and reasoning go nowhere.
        """
        if self._open is not None and self._open["type"] != "message":
            self._unplaced.clear()
        self._unplaced += logprobs

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
                self._unplaced.clear()
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
            if item["type"] == "message":
                self._place("message")
            scores, self._scores = self._scores, []
            part = _content(item["type"], text, scores)
            kind = f"{_TEXTS[item['type']]}.done"
            yield {"type": kind, **where, "text": text, **_logprobs(item["type"], scores)}
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
            yield self._at(
                "response.content_part.added", content_index=0, part=_content(kind, "", [])
            )
        self._pieces.append(text)
        scores = _logprobs(kind, self._place(kind))
        yield self._at(f"{_TEXTS[kind]}.delta", content_index=0, delta=text, **scores)

    def _place(self, kind: str) -> list[Event]:
        """Give the logprobs that wait to the open text, if it is a message; return them."""
        scores, self._unplaced = self._unplaced, []
        if kind != "message":
            return []
        self._scores += scores
        return scores

    def _begin(self, kind: str, fields: dict[str, Any]) -> Iterator[Event]:
        if kind != "message":
            self._unplaced.clear()
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


def _logprobs(kind: str, scores: list[Event]) -> Event:
    """Return what the specification wants with text."""
    return {"logprobs": scores} if kind == "message" else {}


def _content(kind: str, text: str, scores: list[Event]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}
