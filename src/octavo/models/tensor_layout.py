"""Names and shapes of a decoder's tensors: the canonical names are GGUF's."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from octavo.core.errors import LoadError
from octavo.models.config import DecoderConfig

Shape = tuple[int, ...]
MAX_LISTED: Final = 6

QKV: Final = ("attn_q", "attn_k", "attn_v")
BIASED: Final = (*QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""Parts of a layer that may have a bias."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The tensors that a decoder consists of, by canonical name."""

    shapes: Mapping[str, Shape]

    def check(self, found: Mapping[str, Shape], where: str) -> None:
        """Raise LoadError unless ``found`` is exactly this; ``where`` names the file."""
        missing = [name for name in self.shapes if name not in found]
        if missing:
            raise LoadError(f"{where}: missing {listing(missing, 'tensor')}.")
        extra = [name for name in found if name not in self.shapes]
        if extra:
            raise LoadError(
                f"{where}: the configuration does not explain {listing(extra, 'tensor')}."
            )
        for name, shape in self.shapes.items():
            if found[name] != shape:
                raise LoadError(
                    f"{where}: the tensor {name} must have the shape {shape}, as the configuration "
                    f"says, but has {found[name]}."
                )


def decoder_layout(config: DecoderConfig, biased: Collection[str]) -> TensorLayout:
    """Return the layout of ``config``; ``biased`` names the parts of ``BIASED`` with a bias."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    matrices: dict[str, Shape] = {
        "attn_q": (q_width, hidden),
        "attn_k": (kv_width, hidden),
        "attn_v": (kv_width, hidden),
        "attn_output": (hidden, q_width),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    norms: dict[str, Shape] = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
    if config.architecture in ("qwen3", "gemma3"):
        norms |= {"attn_q_norm": (config.head_dim,), "attn_k_norm": (config.head_dim,)}
    if config.architecture == "gemma3":
        norms |= {"post_attention_norm": (hidden,), "post_ffw_norm": (hidden,)}
    part = {f"{name}.weight": shape for name, shape in (matrices | norms).items()}
    part |= {f"{name}.bias": matrices[name][:1] for name in biased}
    shapes: dict[str, Shape] = {"token_embd.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in part.items()}
    shapes["output_norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["output.weight"] = (config.vocab_size, hidden)
    return TensorLayout(shapes)


def listing(names: Collection[str], noun: str) -> str:
    """Return ``3 tensors (a, b, c)``, cut short where there are many."""
    shown = ", ".join(f"{name:.100}" for name in sorted(names)[:MAX_LISTED])
    more = ", ..." if len(names) > MAX_LISTED else ""
    plural = "" if len(names) == 1 else "s"
    return f"{len(names)} {noun}{plural} ({shown}{more})"
