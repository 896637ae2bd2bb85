"""Teaches tools to models whose chat template knows none, as Hermes' models have learned them.

A system message lists the functions and says how to call them; calls and results in the history
become the text that such a model reads and writes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

_INTRO: Final = """\
You can call functions. Each line between <tools> and </tools> describes one of them as JSON:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as JSON, between these marks:
<tool_call>
{{"name": "the function's name", "arguments": {{"the argument's name": "its value"}}}}
</tool_call>
Its result is then given to you between <tool_response> and </tool_response>."""


def teach(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages of plain text that say what ``messages`` and ``tools`` do."""
    taught = [_as_text(message) for message in messages]
    if not tools:
        return taught
    listed = "\n".join(orjson.dumps(tool).decode() for tool in tools)
    intro = _INTRO.format(tools=listed)
    if taught[0]["role"] == "system":
        taught[0] = {**taught[0], "content": f"{_joined(taught[0]['content'])}\n\n{intro}"}
    else:
        taught.insert(0, {"role": "system", "content": intro})
    return taught


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        result = _joined(message["content"])
        return {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"}
    fields = dict(message)
    calls = [call["function"] for call in fields.pop("tool_calls", ())]
    written = [f"<tool_call>\n{orjson.dumps(call).decode()}\n</tool_call>" for call in calls]
    if written:
        said = _joined(message["content"])
        fields["content"] = "\n".join([*([said] if said else []), *written])
    return fields


def _joined(content: str | Sequence[Mapping[str, str]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)
