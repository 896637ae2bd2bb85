"""The ways in which models write tool calls, and which of them a chat template teaches."""

import re
import secrets
import string
from dataclasses import dataclass
from typing import Final

from octavo.core.errors import SettingError


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """How a family of models writes a call: a mark, then one or several JSON objects."""

    name: str
    """What ``--tool-call-parser`` takes."""
    mark: str
    """Announces calls."""
    closers: tuple[str, ...]
    """What may stand after a call."""
    arguments_key: str
    """Key of the arguments beside ``name``."""
    begin: str = ""
    """What a constrained answer writes before the object of its first call, after the mark."""
    end: str = ""
    """What it writes after the object of its last call."""
    between: str = ""
    """What it writes between two objects; empty where there is but one call."""
    bare: bool = False
    """Whether an answer that begins with a JSON object is a call without its mark."""
    named: bool = False
    """Whether the mark may be followed by a name and its arguments alone."""
    separators: str = ""
    """Characters after which another call needs no mark of its own."""
    id_chars: int = 24
    """Length of call ids after their prefix; without a prefix where it is 9, as Mistral has it."""

    def new_id(self) -> str:
        """Return a fresh id for a call."""
        if self.id_chars == 9:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(self.id_chars // 2)}"


_ALPHANUMERIC: Final = string.ascii_letters + string.digits

HERMES: Final = ToolStyle(
    "hermes",
    "<tool_call>",
    ("</tool_call>",),
    "arguments",
    begin="\n",
    end="\n</tool_call>",
    between="\n</tool_call>\n<tool_call>\n",
)
"""Hermes, Qwen 2.5 and 3, and whatever the server teaches it: ``<tool_call>{...}</tool_call>``."""
LLAMA3: Final = ToolStyle("llama3", "<|python_tag|>", (), "parameters", bare=True, separators=";,")
"""Llama 3.1 and later: a JSON object with ``name`` and ``parameters``, perhaps after a mark."""
MISTRAL: Final = ToolStyle(
    "mistral",
    "[TOOL_CALLS]",
    ("]",),
    "arguments",
    begin=" [",
    end="]",
    between=", ",
    named=True,
    separators=",",
    id_chars=9,
)
"""Mistral: a mark and an array of objects, or (newer) a mark, a name and its arguments."""

STYLES: Final = {style.name: style for style in (HERMES, LLAMA3, MISTRAL)}
_SPEAKS_OF_TOOLS: Final = re.compile(r"\b(tools|tool_calls)\b")


def style_named(name: str) -> ToolStyle:
    """Return the style that ``--tool-call-parser`` names."""
    if name not in STYLES:
        raise SettingError(
            f"--tool-call-parser must be one of {', '.join(STYLES)}, not {name!r}.",
            name="--tool-call-parser",
        )
    return STYLES[name]


def style_of(template: str) -> ToolStyle:
    """Return the style that a chat template's text shows; Hermes' where it shows none."""
    for style in (MISTRAL, HERMES, LLAMA3):
        if style.mark in template:
            return style
    if "ipython" in template and "parameters" in template:
        return LLAMA3
    return HERMES


def takes_tools(template: str) -> bool:
    """Whether a chat template writes tools and calls by itself."""
    return _SPEAKS_OF_TOOLS.search(template) is not None
