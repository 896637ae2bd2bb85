"""Where a tokenizer comes from: the metadata of a GGUF file, or a Hugging Face style folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class GGUFTokenizerSource:
    """The ``tokenizer.*`` keys of a GGUF file."""

    metadata: Mapping[str, object]
    """Key to value, keys in full (``tokenizer.ggml.tokens``); arrays are any sequences."""


@dataclass(frozen=True)
class FolderTokenizerSource:
    """A folder with ``tokenizer.json`` and, beside it, the files that say how to use it."""

    folder: Path


TokenizerSource = GGUFTokenizerSource | FolderTokenizerSource
