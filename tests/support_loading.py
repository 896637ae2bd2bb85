"""Tiny random models, written as Hugging Face folders and as GGUF files with equal weights.

``write_hf_folder`` and ``write_gguf`` with the same architecture, overrides and seed hold the same
model (up to rounding), so each format and the reference implementation can be compared.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
VOCAB_SIZE = 288
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_TOKEN_ID = 258
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_HF_CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}


def hf_config(architecture: str, overrides: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Return the ``config.json`` of a tiny model; an override of ``...`` deletes the key."""
    model_type, class_name = _HF_CLASSES[architecture]
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": END_TOKEN_ID,
        "hidden_act": "silu",
    }
    if architecture == "mistral":
        config |= {"sliding_window": None}
    if architecture in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1}
    if architecture == "qwen3":
        config |= {"head_dim": 32, "attention_bias": False}
    if architecture == "gemma3":
        del config["hidden_act"]
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "num_hidden_layers": 7,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        }
    for key, value in (overrides or {}).items():
        if value is ...:
            config.pop(key, None)
        else:
            config[key] = value
    return config


def random_weights(architecture: str, config: Mapping[str, Any], seed: int) -> dict[str, Float32]:
    """Return the model's weights by Hugging Face name, as a folder stores them."""
    rng = np.random.default_rng(seed)
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_width = config["num_attention_heads"] * head_dim
    kv_width = config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> Float32:
        return (rng.standard_normal((rows, columns)) * 1.2 / columns**0.5).astype(np.float32)

    def vector(size: int, mean: float) -> Float32:
        return (mean + 0.2 * rng.standard_normal(size)).astype(np.float32)

    norm_mean = 0.0 if architecture == "gemma3" else 1.0
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if architecture == "gemma3":
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if architecture in ("qwen3", "gemma3"):
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    matrices = {
        "self_attn.q_proj": (q_width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, q_width),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    biased = set()
    if architecture == "qwen2" or config.get("attention_bias"):
        biased |= {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
    if config.get("attention_bias"):
        biased |= {"self_attn.o_proj"}
    if config.get("mlp_bias"):
        biased |= {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}

    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in matrices.items():
            weights[f"{prefix}.{name}.weight"] = matrix(*shape)
            if name in biased:
                weights[f"{prefix}.{name}.bias"] = vector(shape[0], 0.0)
        for name, size in norms.items():
            weights[f"{prefix}.{name}.weight"] = vector(size, norm_mean)
    weights["model.norm.weight"] = vector(hidden, norm_mean)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return weights


# --- Hugging Face folders ---------------------------------------------------------------------


def write_hf_folder(
    folder: Path,
    architecture: str,
    *,
    config_overrides: Mapping[str, object] | None = None,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    edit: Callable[[dict[str, Float32]], None] | None = None,
) -> Path:
    """Write a model folder with ``config.json``, safetensors and a tokenizer; return ``folder``.

    ``dtype`` is float32, float16 or bfloat16; more than one of ``shards`` makes an index;
    ``edit`` may change the weights (by Hugging Face name) before they are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(architecture, config_overrides)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weights = random_weights(architecture, config, seed)
    if edit is not None:
        edit(weights)
    names = list(weights)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", weights, dtype)
    else:
        weight_map = {}
        for index in range(shards):
            file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
            part = {name: weights[name] for name in names[index::shards]}
            write_safetensors(folder / file, part, dtype)
            weight_map |= dict.fromkeys(part, file)
        write_index(folder, weight_map)
    write_tokenizer_files(folder)
    return folder


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    """Write the index that says which file holds which tensor."""
    index = {"metadata": {}, "weight_map": dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_safetensors(path: Path, weights: Mapping[str, Float32], dtype: str = "float32") -> None:
    """Write ``weights`` as a safetensors file of one ``dtype``."""
    code = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    header: dict[str, object] = {}
    blobs = []
    offset = 0
    for name, values in weights.items():
        blob = encode_plain(values, code)
        end = offset + len(blob)
        header[name] = {
            "dtype": code,
            "shape": list(values.shape),
            "data_offsets": [offset, end],
        }
        blobs.append(blob)
        offset = end
    write_safetensors_raw(path, header, b"".join(blobs))


def write_safetensors_raw(path: Path, header: Mapping[str, object] | bytes, data: bytes) -> None:
    """Write a safetensors file with whatever header the test wants."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def encode_plain(values: Float32, code: str) -> bytes:
    """Return ``values`` as F32, F16 or BF16 bytes."""
    if code == "BF16":
        return bytes(gguf.quants.quantize(values, GGMLQuantizationType.BF16).tobytes())
    return values.astype({"F32": "<f4", "F16": "<f2"}[code]).tobytes()


def byte_alphabet() -> list[str]:
    """Return the printable character that stands for each byte in byte-level BPE."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def tokenizer_tokens(vocab_size: int = VOCAB_SIZE) -> list[str]:
    """Return a vocabulary without merges: every byte, the special tokens, then unused ones."""
    tokens = [*byte_alphabet(), *SPECIAL_TOKENS]
    return [*tokens, *(f"<unused{n}>" for n in range(vocab_size - len(tokens)))][:vocab_size]


def write_tokenizer_files(folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` of the byte-level vocabulary."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 256 + index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokenizer_tokens())},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


# --- GGUF files -------------------------------------------------------------------------------

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(architecture: str, hf_name: str) -> str:
    """Return the GGUF name of a tensor with a Hugging Face name."""
    stem, kind = hf_name.rsplit(".", 1)
    layer = ""
    if stem.startswith("model.layers."):
        _, _, number, stem = stem.split(".", 3)
        layer = f"blk.{number}."
    if stem == "post_attention_layernorm":
        stem = "post_attention_norm" if architecture == "gemma3" else "ffn_norm"
    else:
        stem = _GGUF_NAMES[stem]
    return f"{layer}{stem}.{kind}"


def interleave(values: Float32, num_heads: int) -> Float32:
    """Reorder q or k rows as llama.cpp's converter does for interleaved rotation."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def gguf_weights(architecture: str, config: Mapping[str, Any], seed: int) -> dict[str, Float32]:
    """Return the model's weights by GGUF name, as a converter would store them."""
    weights = {}
    for hf_name, values in random_weights(architecture, config, seed).items():
        name = gguf_name(architecture, hf_name)
        if architecture in ("llama", "mistral") and ".attn_q." in name:
            values = interleave(values, config["num_attention_heads"])
        if architecture in ("llama", "mistral") and ".attn_k." in name:
            values = interleave(values, config["num_key_value_heads"])
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + np.float32(1.0)
        weights[name] = values
    return weights


def write_gguf(
    path: Path,
    architecture: str,
    *,
    encodings: str | Mapping[str, str] = "F32",
    seed: int = 0,
    config_overrides: Mapping[str, object] | None = None,
    metadata: Mapping[str, object] | None = None,
    edit: Callable[[dict[str, Float32]], None] | None = None,
) -> Path:
    """Write a GGUF file with the same model as ``write_hf_folder``; return ``path``.

    ``encodings`` is the encoding of all matrices, or maps parts of names (``attn_q``) to one, F32
    for the rest; K encodings need rows of a multiple of 256 (override ``hidden_size`` and
    ``intermediate_size``) and hold random blocks instead of the random weights. ``metadata`` adds
    or replaces keys (``...`` deletes one); ``edit`` may change the weights by GGUF name.
    """
    config = hf_config(architecture, config_overrides)
    weights = gguf_weights(architecture, config, seed)
    if edit is not None:
        edit(weights)
    name = "llama" if architecture == "mistral" else architecture
    writer = gguf.GGUFWriter(path, name)
    values = gguf_metadata(name, config) | dict(metadata or {})
    for key, value in values.items():
        if value is not ...:
            add_value(writer, key, value)
    rng = np.random.default_rng(seed + 1)
    for tensor_name, tensor in weights.items():
        label = encoding_of(tensor_name, tensor, encodings)
        kind = GGMLQuantizationType[label]
        writer.add_tensor(tensor_name, encode(tensor, label, rng), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_metadata(name: str, config: Mapping[str, Any]) -> dict[str, object]:
    """Return the metadata of a model, tokenizer included."""
    metadata: dict[str, object] = {
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.key_length": config["head_dim"],
        f"{name}.attention.value_length": config["head_dim"],
        f"{name}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{name}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokenizer_tokens(config["vocab_size"]),
        "tokenizer.ggml.token_type": [
            3 if token in SPECIAL_TOKENS else 5 if token.startswith("<unused") else 1
            for token in tokenizer_tokens(config["vocab_size"])
        ],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": END_TOKEN_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    if name == "gemma3":
        metadata["gemma3.attention.sliding_window"] = config["sliding_window"]
    return metadata


def add_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """Add a key with the value type that converters use for such a value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list)
        writer.add_array(key, value)


def encoding_of(name: str, tensor: Float32, encodings: str | Mapping[str, str]) -> str:
    """Return the label of a tensor's encoding."""
    if tensor.ndim == 1:
        return "F32"
    if isinstance(encodings, str):
        return encodings
    return next((label for part, label in encodings.items() if part in name), "F32")


def encode(values: Float32, label: str, rng: np.random.Generator) -> NDArray[Any]:
    """Return ``values`` in an encoding; K encodings, which gguf cannot make, are random blocks."""
    if label == "F32":
        return values
    if label.endswith("_K"):
        return random_k_blocks(label, values.shape[0], values.shape[1], rng)
    quantized: NDArray[Any] = gguf.quants.quantize(values, GGMLQuantizationType[label])
    return quantized.view(np.float16) if label == "F16" else quantized


def random_k_blocks(
    label: str, rows: int, columns: int, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Return random K-quantised rows whose values are of the size of a model's weights."""
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[label]]
    assert columns % block_len == 0, "K encodings need rows of a multiple of 256"
    blocks = rng.integers(0, 256, (rows, columns // block_len, block_bytes), dtype=np.uint8)
    scale = np.float16(0.5 / columns**0.5 / {"Q4_K": 256, "Q5_K": 512, "Q6_K": 1024}[label])
    jitter = rng.uniform(0.5, 1.0, (2, rows, columns // block_len))
    positions = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[label]
    for position, factor in zip(positions, jitter, strict=False):
        share = (scale * factor * (1.0 if position != 2 else 8.0)).astype("<f2")
        blocks[:, :, position : position + 2] = share[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


# --- GGUF files byte by byte, for what no writer would write ------------------------------------


def gguf_string(text: str | bytes) -> bytes:
    """Return a string as GGUF stores it."""
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_key(key: str, value_type: int, value: bytes) -> bytes:
    """Return a metadata entry."""
    return gguf_string(key) + struct.pack("<I", value_type) + value


def gguf_tensor(name: str, dimensions: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """Return a row of the tensor table; dimensions are in GGUF's order, row length first."""
    count = len(dimensions)
    return gguf_string(name) + struct.pack(f"<I{count}QIQ", count, *dimensions, kind, offset)


def gguf_bytes(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    """Return a file of these parts, with its data aligned to 32 bytes."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join([*keys, *tensors])
    return header + b"\0" * (-len(header) % 32) + data
