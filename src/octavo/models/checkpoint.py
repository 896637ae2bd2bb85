"""Opens a model: a GGUF file or a Hugging Face style folder, checked as a whole."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from octavo.core.errors import LoadError
from octavo.kernels.weights import WeightTensor
from octavo.models.config import DecoderConfig
from octavo.models.fingerprint import weights_fingerprint
from octavo.models.gguf import read_gguf
from octavo.models.gguf_config import read_gguf_config, read_gguf_end_tokens
from octavo.models.rope_order import NeoxTensors
from octavo.models.tensor_layout import BIASED, QKV, decoder_layout
from octavo.models.tokenizer_source import (
    GGUFTokenizerSource,
    TokenizerSource,
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model: its header is read and checked, its weights stay in the mapped file."""

    path: Path
    name: str
    """The file's stem or the folder's name."""
    config: DecoderConfig
    fingerprint: str
    """Hex digest of configuration and weights; see ``weights_fingerprint`` for what it samples."""
    tensors: Mapping[str, WeightTensor]
    """Canonical names are GGUF's (``blk.0.attn_q.weight``); exactly those the decoder needs. Rows
    of q and k are in NeoX order (halves rotate), whatever order the file has."""
    end_token_ids: frozenset[int]
    """Every end-of-turn id that the model's configuration names."""
    tokenizer_source: TokenizerSource


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a ``.gguf`` file, or a folder with ``config.json`` and safetensors.

    Raises:
        LoadError: the model is missing, corrupt, inconsistent or not supported.
    """
    return _open_folder(path) if path.is_dir() else _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    file = read_gguf(path)
    config = read_gguf_config(file)
    stored = {name: tensor for name, tensor in file.tensors.items() if name != "rope_freqs.weight"}
    biased = {part for part in BIASED if f"blk.0.{part}.bias" in stored}
    if config.architecture == "qwen2":
        biased |= set(QKV)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    decoder_layout(config, biased).check(shapes, str(path))
    # The converter of this architecture alone reorders q and k for interleaved rotation.
    interleaved = config.architecture == "llama"
    return Checkpoint(
        path=path,
        name=path.stem,
        config=config,
        fingerprint=weights_fingerprint(config, stored),
        tensors=NeoxTensors(stored, config) if interleaved else MappingProxyType(stored),
        end_token_ids=read_gguf_end_tokens(file),
        tokenizer_source=GGUFTokenizerSource(
            MappingProxyType(
                {key: file.metadata[key] for key in file.metadata if key.startswith("tokenizer.")}
            )
        ),
    )


def _open_folder(path: Path) -> Checkpoint:
    raise LoadError(f"{path}: folders are not supported yet.")
