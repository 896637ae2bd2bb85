"""Opens a model: a GGUF file or a Hugging Face style folder, checked as a whole."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from octavo.core.errors import LoadError
from octavo.kernels.weights import WeightTensor
from octavo.models.config import DecoderConfig
from octavo.models.config_values import ConfigValues
from octavo.models.fingerprint import weights_fingerprint
from octavo.models.gguf import read_gguf
from octavo.models.gguf_config import read_gguf_config, read_gguf_end_tokens
from octavo.models.hf_config import HFConfig, read_end_tokens, read_hf_config
from octavo.models.hf_names import map_names
from octavo.models.model_folder import ModelFolder
from octavo.models.rope_order import NeoxTensors
from octavo.models.safetensors_files import open_folder_weights
from octavo.models.tensor_layout import BIASED, QKV, decoder_layout
from octavo.models.tokenizer_source import (
    FolderTokenizerSource,
    GGUFTokenizerSource,
    TokenizerSource,
)

logger = logging.getLogger(__name__)

CONFIG_NAME: Final = "config.json"
GENERATION_CONFIG_NAME: Final = "generation_config.json"


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
    if os.path.isdir(path):  # unlike Path.is_dir, False for whatever cannot be looked at
        return _open_folder(path)
    if path.suffix == ".safetensors" and os.path.isfile(path):
        raise LoadError(f"{path} is only a part of a model; name the folder that it is in.")
    return _open_gguf(path)


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
    folder = ModelFolder(path)
    if not folder.has(CONFIG_NAME):
        raise LoadError(_why_no_model(folder))
    hf = read_hf_config(folder.read_json(CONFIG_NAME), str(path / CONFIG_NAME))
    config = hf.decoder
    stored = _stored_tensors(folder, hf)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    decoder_layout(config, hf.biased).check(shapes, str(path))
    end_token_ids = hf.end_token_ids
    if folder.has(GENERATION_CONFIG_NAME):
        generation = folder.read_json(GENERATION_CONFIG_NAME)
        where = str(path / GENERATION_CONFIG_NAME)
        end_token_ids |= read_end_tokens(ConfigValues(generation, where))
    return Checkpoint(
        path=path,
        name=path.resolve().name,
        config=config,
        fingerprint=weights_fingerprint(config, stored),
        tensors=MappingProxyType(stored),
        end_token_ids=end_token_ids,
        tokenizer_source=FolderTokenizerSource(path),
    )


def _stored_tensors(folder: ModelFolder, hf: HFConfig) -> dict[str, WeightTensor]:
    """Return the folder's tensors by canonical name, without a head that is tied."""
    weights = open_folder_weights(folder)
    names = map_names(
        weights,
        gemma=hf.decoder.architecture == "gemma3",
        multimodal=hf.multimodal,
        where=str(folder.path),
    )
    stored = {name: replace(weights[names[name]], name=name) for name in names}
    if hf.decoder.tied_embeddings and "output.weight" in stored:
        head, table = stored.pop("output.weight"), stored.get("token_embd.weight")
        if table is None or not _same(head, table):
            logger.warning(
                "%s: ignoring %s, which differs from the embedding table although "
                "tie_word_embeddings is true",
                folder.path,
                names["output.weight"],
            )
    return stored


def _same(first: WeightTensor, second: WeightTensor) -> bool:
    return first.encoding is second.encoding and np.array_equal(first.data, second.data)


def _why_no_model(folder: ModelFolder) -> str:
    if ggufs := [name for name in folder.names() if name.endswith(".gguf")]:
        return f"{folder.path} has no {CONFIG_NAME}; to serve {ggufs[0]}, name that file itself."
    return f"{folder.path} has no {CONFIG_NAME}, so it is not a model's folder."
