"""What tests of tools share: tools, an engine that calls them, streams put together again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from octavo.core.sampling import SamplingParams
from support_server import INFO, ByteTemplate, ByteTokenizer, ScriptedEngine

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Tells the weather", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ARGUMENTS = '{"city": "Paris"}'
QWEN = "{% if tools %}<tool_call>{% endif %}"
"""Enough of a chat template to see Hermes' style in it."""


def calling_engine(text: str = CALL, *, template: str = QWEN, **fields: Any) -> ScriptedEngine:
    """An engine that answers with this text, with a template that knows so much."""

    def answer(prompt: Sequence[int], sampling: SamplingParams, index: int) -> bytes:
        return text.encode()

    tokenizer = ByteTokenizer()
    tokenizer.chat_template = ByteTemplate(template)
    info = replace(INFO, max_model_len=4096, num_blocks=512)
    return ScriptedEngine(answer=answer, tokenizer=tokenizer, info=info, **fields)


def prompt_of(engine: ScriptedEngine) -> str:
    """The text of the prompt that the engine was given last."""
    return bytes(engine.calls[-1]["prompt"]).decode()


def joined_message(chunks: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """Put the message of one choice of a chat stream together as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key) or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({**call, "function": dict(call["function"])})
                else:
                    function = message["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
    return message


def named_events(data: bytes) -> list[dict[str, Any]]:
    """Read a stream of named events: each name is its body's type, and there is no [DONE]."""
    frames = data.decode().split("\n\n")
    assert frames.pop() == ""
    bodies = []
    for frame in frames:
        name, body = frame.split("\n")
        bodies.append(orjson.loads(body.removeprefix("data: ")))
        assert name == f"event: {bodies[-1]['type']}"
    return bodies
