"""A GGUF model of a known shape with random weights: speed needs the shape, not the knowledge.

``python benchmarks/peers/random_model.py qwen2.5-0.5b`` writes it into the cache folder and prints
its path, for ``compare.py --model``. Its tokenizer is the default model's, padded.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from environments import peers_cache
from numpy.typing import NDArray

from octavo.models.source import default_cache_dir, resolve_model

WEIGHT_STD: Final = 0.02
BF16: Final = gguf.GGMLQuantizationType.BF16
F32: Final = gguf.GGMLQuantizationType.F32


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder with tied embeddings."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float
    norm_eps: float
    qkv_bias: bool

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and row-major shapes."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "token_embd.weight", (self.vocab_size, self.hidden_size)
        yield "output_norm.weight", (self.hidden_size,)
        for layer in range(self.num_layers):
            block = f"blk.{layer}."
            yield block + "attn_norm.weight", (self.hidden_size,)
            yield block + "ffn_norm.weight", (self.hidden_size,)
            for part, rows in (("attn_q", queries), ("attn_k", keys), ("attn_v", keys)):
                yield f"{block}{part}.weight", (rows, self.hidden_size)
                if self.qkv_bias:
                    yield f"{block}{part}.bias", (rows,)
            yield block + "attn_output.weight", (self.hidden_size, queries)
            yield block + "ffn_gate.weight", (self.intermediate_size, self.hidden_size)
            yield block + "ffn_up.weight", (self.intermediate_size, self.hidden_size)
            yield block + "ffn_down.weight", (self.hidden_size, self.intermediate_size)


SHAPES: Final = {
    "qwen2.5-0.5b": Shape("qwen2", 151_936, 896, 4864, 24, 14, 2, 64, 32_768, 1e6, 1e-6, True),
}


def write_random_model(shape: Shape, tokenizer_of: Path, target: Path, seed: int = 0) -> None:
    """Write a GGUF file with bfloat16 matrices and float32 vectors."""
    writer = gguf.GGUFWriter(target, shape.architecture)
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_position)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    _copy_tokenizer(gguf.GGUFReader(tokenizer_of), writer, shape.vocab_size)
    rng = np.random.default_rng(seed)
    for name, size in shape.tensors():
        data, kind = _values(rng, name, size)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _values(
    rng: np.random.Generator, name: str, size: tuple[int, ...]
) -> tuple[NDArray[Any], gguf.GGMLQuantizationType]:
    if name.endswith("norm.weight"):
        return np.ones(size, np.float32), F32
    values = WEIGHT_STD * rng.standard_normal(size, dtype=np.float32)
    return (values, F32) if len(size) == 1 else (gguf.quants.quantize(values, BF16), BF16)


def _copy_tokenizer(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, vocab_size: int) -> None:
    for field in reader.fields.values():
        if not field.name.startswith("tokenizer."):
            continue
        value = field.contents()
        if field.name == "tokenizer.ggml.tokens":
            value = [*value, *(f"[unused {index}]" for index in range(len(value), vocab_size))]
        elif field.name == "tokenizer.ggml.token_type":
            value = [*value, *[int(gguf.TokenType.UNUSED)] * (vocab_size - len(value))]
        item_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, value, field.types[0], item_type)


def main() -> int:
    """Write the model unless it is there, and print where."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--cache", help="folder of environments, models and results")
    arguments = parser.parse_args()
    target = peers_cache(arguments.cache) / "models" / f"random-{arguments.shape}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        tokenizer_of = resolve_model("smollm2", cache_dir=default_cache_dir()).path
        unfinished = target.with_name(f"unfinished-{target.name}")
        write_random_model(SHAPES[arguments.shape], tokenizer_of, unfinished)
        unfinished.rename(target)
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
