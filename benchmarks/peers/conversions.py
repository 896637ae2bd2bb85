"""One model in every format the peers read, made once and kept in the cache folder.

The source is a GGUF file. Its weights, decoded by Octavo, become a Hugging Face folder in bfloat16
(vLLM, and OpenVINO through its own exporter) and GGUF files of other encodings (llama.cpp), so that
all engines compute the same model up to the rounding of their format.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from environments import Environment, PeerUnavailable
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file
from tokenizers import decoders

from octavo.kernels.dequantize import to_float32
from octavo.models.checkpoint import Checkpoint, open_checkpoint
from octavo.models.config import DecoderConfig
from octavo.models.tokenizer_gguf import parts_from_gguf
from octavo.models.tokenizer_source import GGUFTokenizerSource

EXPORT_TIMEOUT_S: Final = 3600
HF_CLASSES: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
HF_TOP: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
HF_LAYER: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NOT_COPIED: Final = ("GGUF.", "general.architecture", "general.file_type")


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """The formats of one GGUF model; each is made when it is first asked for."""

    source: Path
    folder: Path
    """Where its conversions lie."""

    @classmethod
    def of(cls, source: Path, cache: Path) -> "ModelFormats":
        """Name the conversions of a model by its content."""
        return cls(source, cache / "models" / open_checkpoint(source).fingerprint[:16])

    def hugging_face(self) -> Path:
        """Return a folder of bfloat16 safetensors, configuration and tokenizer."""
        return self._made("hf-bf16", lambda path: write_hf_folder(self.source, path))

    def gguf_file(self, encoding: str) -> Path:
        """Return a GGUF file whose matrices are ``Q8_0``, ``BF16`` or ``Q4_1``."""
        if _main_encoding(self.source) == encoding:
            return self.source
        name = f"model-{encoding}.gguf"
        return self._made(name, lambda path: write_gguf(self.source, path, encoding))

    def openvino(self, environment: Environment, weight_format: str) -> Path:
        """Return a folder that OpenVINO's exporter made in its own environment.

        Raises:
            PeerUnavailable: the export failed.
        """
        folder = self.hugging_face()
        return self._made(
            f"openvino-{weight_format}",
            lambda path: _export_openvino(environment, folder, path, weight_format),
        )

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        """Make under another name first, so that what has its name is whole."""
        path = self.folder / name
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished = self.folder / f"unfinished-{name}"
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            unfinished.rename(path)
        return path


def write_hf_folder(source: Path, folder: Path) -> None:
    """Write the GGUF file's model as a Hugging Face style folder in bfloat16.

    Raises:
        PeerUnavailable: its architecture cannot be spelled so here.
    """
    checkpoint = open_checkpoint(source)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_hf_config(checkpoint), indent=1))
    _write_tokenizer(checkpoint, folder)
    arrays = {
        _hf_name(name): _bfloat16_bits(to_float32(tensor))
        for name, tensor in checkpoint.tensors.items()
    }
    specs = {name: _spec(bits) for name, bits in arrays.items()}
    serialize_file(specs, folder / "model.safetensors", {"format": "pt"})


def write_gguf(source: Path, target: Path, encoding: str) -> None:
    """Copy a GGUF file with its matrices in another encoding; vectors stay as they are."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if not field.name.startswith(NOT_COPIED):
            item_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], item_type)
    kind = gguf.GGMLQuantizationType[encoding]
    for name, data, stored in _encoded(reader, kind):
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _encoded(
    reader: gguf.GGUFReader, kind: gguf.GGMLQuantizationType
) -> Iterator[tuple[str, NDArray[Any], gguf.GGMLQuantizationType]]:
    for tensor in reader.tensors:
        if len(tensor.shape) == 1 or tensor.tensor_type == kind:
            yield tensor.name, tensor.data, tensor.tensor_type
        else:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            yield tensor.name, gguf.quants.quantize(values, kind), kind


def _main_encoding(source: Path) -> str:
    """Return the encoding of most bytes of the file's matrices."""
    sizes: dict[str, int] = {}
    for tensor in gguf.GGUFReader(source).tensors:
        if len(tensor.shape) > 1 and tensor.name != "token_embd.weight":
            name = tensor.tensor_type.name
            sizes[name] = sizes.get(name, 0) + int(tensor.n_bytes)
    return max(sizes, key=lambda name: sizes[name])


def _export_openvino(
    environment: Environment, folder: Path, target: Path, weight_format: str
) -> None:
    command: list[str | Path] = [environment.python.with_name("optimum-cli"), "export", "openvino"]
    command += ["--model", folder, "--task", "text-generation-with-past"]
    command += ["--weight-format", weight_format, target]
    log = environment.folder / "export.log"
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with log.open("w") as sink:
        try:
            done = subprocess.run(
                command, env=env, stdout=sink, stderr=sink, timeout=EXPORT_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerUnavailable(f"OpenVINO's export failed: {error}.") from error
    if done.returncode != 0:
        raise PeerUnavailable(f"OpenVINO's export failed; see {log}.")


def _hf_config(checkpoint: Checkpoint) -> dict[str, object]:
    config: DecoderConfig = checkpoint.config
    if config.architecture not in HF_CLASSES or config.rope.scaling != "none":
        raise PeerUnavailable(
            f"Only plain {' and '.join(HF_CLASSES)} models can be converted for the peers, not "
            f"{config.architecture} with {config.rope.scaling} rope scaling."
        )
    return {
        "architectures": [HF_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": "bfloat16",
        "eos_token_id": sorted(checkpoint.end_token_ids),
    }


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    source = checkpoint.tokenizer_source
    if not isinstance(source, GGUFTokenizerSource):
        raise PeerUnavailable(f"{checkpoint.path} is not a GGUF file.")
    parts = parts_from_gguf(source.metadata)
    if source.metadata["tokenizer.ggml.model"] == "gpt2":
        parts.backend.decoder = decoders.ByteLevel()
    else:
        spaces, strip = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
        steps = [spaces, decoders.ByteFallback(), decoders.Fuse(), strip]
        parts.backend.decoder = decoders.Sequence(steps)
    parts.backend.save(str(folder / "tokenizer.json"))
    ends = sorted(checkpoint.end_token_ids)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": parts.backend.id_to_token(ends[0]) if ends else None,
        "model_max_length": checkpoint.config.max_position,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{HF_TOP[stem]}.{kind}"
    _, layer, part = stem.split(".", 2)
    return f"model.layers.{layer}.{HF_LAYER[part]}.{kind}"


def _spec(bits: NDArray[np.uint16]) -> TensorSpec:
    return TensorSpec(
        dtype="bfloat16",
        shape=list(bits.shape),
        data_ptr=bits.ctypes.data,
        data_len=bits.nbytes,
    )


def _bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to bfloat16, to nearest even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)
