"""config.json to decoder configuration: what counts, what is refused by its key."""

import logging
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import LoadError
from octavo.models.hf_config import HFConfig, read_hf_config
from octavo.models.rope import build_rope
from support_loading import ARCHITECTURES, hf_config


def read(architecture: str, **overrides: object) -> HFConfig:
    """Read a tiny model's config.json; an override of ``...`` deletes the key."""
    return read_hf_config(hf_config(architecture, overrides), "config.json")


def refused(architecture: str, **overrides: object) -> str:
    """Check that a config.json is refused, and return the sentence."""
    with pytest.raises(LoadError) as caught:
        read(architecture, **overrides)
    assert caught.value.message.startswith("config.json: ")
    return caught.value.message


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plain_settings(architecture: str) -> None:
    """Sizes go where they belong: red if two are swapped."""
    config = read(architecture, num_hidden_layers=2, num_key_value_heads=1).decoder
    assert config.architecture == ("llama" if architecture == "mistral" else architecture)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (288, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 1)
    assert (config.max_position, config.norm_eps) == (512, 1e-5)
    assert config.tied_embeddings is (architecture == "gemma3")
    assert config.attention_scale == pytest.approx(config.head_dim**-0.5)


def test_gemma3_is_special() -> None:
    """Gemma's norms are stored less one, its embeddings scaled, its attention scale its own."""
    config = read(
        "gemma3",
        query_pre_attn_scalar=40,
        final_logit_softcapping=30.0,
        attn_logit_softcapping=50.0,
    ).decoder
    assert config.norm_offset == 1.0
    assert config.embedding_scale == math.sqrt(64)
    assert config.attention_scale == pytest.approx(40**-0.5)
    assert config.activation == "gelu_tanh"
    assert (config.logits_softcap, config.attention_softcap) == (30.0, 50.0)
    assert config.sliding_layers == (True,) * 5 + (False, True)
    assert config.local_rope is not None
    assert (config.rope.theta, config.local_rope.theta) == (1e6, 1e4)


def multimodal(**outer: object) -> dict[str, Any]:
    """A config.json like the published multimodal gemma3, whose text part names few settings."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
        **outer,
    }


def test_multimodal_gemma3_relies_on_published_defaults() -> None:
    """The text part of a published gemma3 leaves out what the family's defaults say."""
    hf = read_hf_config(multimodal(), "config.json")
    assert hf.multimodal
    assert hf.end_token_ids == {1, 106}
    config = hf.decoder
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_position) == (262208, 131072)
    assert (config.rope.scaling, config.rope.factor, config.rope.theta) == ("linear", 8.0, 1e6)
    assert config.local_rope is not None
    assert (config.local_rope.scaling, config.local_rope.theta) == ("none", 1e4)
    assert config.tied_embeddings


def test_errors_in_text_config_name_it() -> None:
    """A key of the text part is named with its place."""
    config = multimodal()
    config["text_config"]["num_hidden_layers"] = 0
    with pytest.raises(LoadError, match=r"text_config\.num_hidden_layers"):
        read_hf_config(config, "config.json")
    with pytest.raises(LoadError, match="text_config is missing"):
        read_hf_config({**multimodal(), "text_config": None}, "config.json")


def test_tie_in_sub_configs() -> None:
    """LO-02: outside, inside, both alike; two that contradict are refused."""
    for outer, inner, wanted in ((False, ..., False), (..., False, False), (True, True, True)):
        config = multimodal()
        if outer is not ...:
            config["tie_word_embeddings"] = outer
        if inner is not ...:
            config["text_config"]["tie_word_embeddings"] = inner
        assert read_hf_config(config, "config.json").decoder.tied_embeddings is wanted
    config = multimodal(tie_word_embeddings=True)
    config["text_config"]["tie_word_embeddings"] = False
    with pytest.raises(LoadError, match="tie_word_embeddings contradicts"):
        read_hf_config(config, "config.json")


@pytest.mark.parametrize(
    ("architecture", "class_name"),
    [("llama", "LlamaForCausalLM"), ("gemma3", "Gemma3ForCausalLM")],
)
def test_the_class_stands_in_for_the_model_type(architecture: str, class_name: str) -> None:
    """A config.json without model_type is read by the class it names, and the other way round."""
    assert read(architecture, model_type=...).decoder == read(architecture).decoder
    assert read(architecture, architectures=...).decoder == read(architecture).decoder
    assert read(architecture, architectures=None).decoder == read(architecture).decoder
    assert "architectures" in refused(architecture, architectures=["GPT2LMHeadModel"])
    assert "contradicts" in refused(architecture, architectures=["Qwen2ForCausalLM"])


# --- what is refused, by key --------------------------------------------------------------------

BAD_SETTINGS: list[tuple[str, str, object]] = [
    ("llama", "model_type", "mixtral"),
    ("llama", "vocab_size", ...),
    ("llama", "vocab_size", 0),
    ("llama", "vocab_size", "288"),
    ("llama", "hidden_size", True),
    ("llama", "hidden_size", 64.5),
    ("llama", "hidden_size", -64),
    ("llama", "intermediate_size", None),
    ("llama", "num_hidden_layers", 0),
    ("llama", "num_hidden_layers", 10_000),
    ("llama", "num_hidden_layers", 10**30),
    ("llama", "num_attention_heads", 0),
    ("llama", "num_key_value_heads", 3),
    ("llama", "num_key_value_heads", 8),
    ("llama", "head_dim", 15),
    ("llama", "rms_norm_eps", 0),
    ("llama", "rms_norm_eps", float("nan")),
    ("llama", "rms_norm_eps", float("inf")),
    ("llama", "rope_theta", -1.0),
    ("llama", "rope_theta", 1.0),
    ("llama", "max_position_embeddings", 0),
    ("llama", "tie_word_embeddings", "yes"),
    ("llama", "hidden_act", "gelu"),
    ("llama", "quantization_config", {"quant_method": "fp8"}),
    ("llama", "sliding_window", 32),
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "attention_bias", "true"),
    ("llama", "num_local_experts", 8),
    ("mistral", "attention_bias", True),
    ("mistral", "mlp_bias", True),
    ("mistral", "partial_rotary_factor", 0.5),
    ("qwen2", "mlp_bias", True),
    ("qwen2", "layer_types", ["full_attention"]),
    ("qwen2", "layer_types", ["full_attention", "chunked_attention", "full_attention"]),
    ("qwen2", "layer_types", ["full_attention", ["x"], "full_attention"]),
    ("qwen3", "num_experts", 4),
    ("gemma3", "use_bidirectional_attention", True),
    ("gemma3", "hidden_activation", "gelu"),
    ("gemma3", "query_pre_attn_scalar", 0),
    ("gemma3", "final_logit_softcapping", -30.0),
    ("gemma3", "sliding_window", None),
    ("gemma3", "sliding_window_pattern", 0),
]


@pytest.mark.parametrize(("architecture", "key", "value"), BAD_SETTINGS)
def test_settings_refused_by_key(architecture: str, key: str, value: object) -> None:
    """LO-12: what is out of range or would change results unseen fails at load with its key."""
    assert key in refused(architecture, **{key: value})


def test_heads_that_do_not_divide_the_hidden_size() -> None:
    """LO-12: without head_dim the hidden size must divide; with it, any size will do."""
    assert "hidden_size" in refused("llama", head_dim=..., num_attention_heads=6)
    assert read("llama", head_dim=24).decoder.head_dim == 24
    assert read("llama", head_dim=None).decoder.head_dim == 16
    assert read("llama", num_key_value_heads=None).decoder.num_kv_heads == 4
    assert read("llama", num_key_value_heads=...).decoder.num_kv_heads == 4


@pytest.mark.parametrize(
    ("eos", "wanted"), [(2, {2}), ([1, 106], {1, 106}), (None, set()), (..., set()), ([], set())]
)
def test_end_token_spellings(eos: object, wanted: set[int]) -> None:
    """LO-12: eos_token_id may be one id, a list, null or absent."""
    assert read("llama", eos_token_id=eos).end_token_ids == wanted


@pytest.mark.parametrize("eos", ["</s>", -1, 2.0, True, [1, None], {"id": 1}])
def test_end_tokens_that_are_none(eos: object) -> None:
    """LO-12: anything else is refused by key, not dropped."""
    assert "eos_token_id" in refused("llama", eos_token_id=eos)


@pytest.mark.parametrize("tag", ["bfloat16", "float16", "float32", None])
def test_dtype_tags_change_nothing(tag: str | None) -> None:
    """LO-12: the tensors say their own dtype; the tag in config.json is not trusted."""
    assert read("llama", torch_dtype=tag).decoder == read("llama", dtype=tag).decoder


def test_biases() -> None:
    """attention_bias and mlp_bias name the parts that must have a bias."""
    assert read("llama").biased == frozenset()
    assert read("llama", attention_bias=True).biased == {
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
    }
    assert read("llama", mlp_bias=True).biased == {"ffn_gate", "ffn_up", "ffn_down"}
    assert read("qwen2").biased == {"attn_q", "attn_k", "attn_v"}
    assert read("qwen3", attention_bias=True).biased >= {"attn_output"}


# --- sliding windows ----------------------------------------------------------------------------


def test_mistral_window() -> None:
    """All layers slide; null or a window past the context means none; absent means 4096."""
    assert read("mistral").decoder.sliding_window is None
    config = read("mistral", sliding_window=32).decoder
    assert (config.sliding_window, config.sliding_layers) == (32, ())
    assert read("mistral", sliding_window=512).decoder.sliding_window is None
    absent = read("mistral", sliding_window=..., max_position_embeddings=32768).decoder
    assert absent.sliding_window == 4096


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_window(architecture: str) -> None:
    """use_sliding_window turns it on from layer max_window_layers; layer_types decides if there."""
    assert read(architecture).decoder.sliding_window is None
    on = read(architecture, use_sliding_window=True).decoder
    assert (on.sliding_window, on.sliding_layers) == (32, (False, True, True))
    all_layers = read(architecture, use_sliding_window=True, max_window_layers=0).decoder
    assert (all_layers.sliding_window, all_layers.sliding_layers) == (32, ())
    beyond = read(architecture, use_sliding_window=True, max_window_layers=3).decoder
    assert (beyond.sliding_window, beyond.sliding_layers) == (None, ())
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    chosen = read(architecture, use_sliding_window=True, layer_types=kinds).decoder
    assert chosen.sliding_layers == (True, False, False)
    assert "sliding_window" in refused(architecture, layer_types=kinds)


def test_gemma3_layer_types_and_pattern() -> None:
    """layer_types decides, else the pattern, else every sixth layer is global."""
    kinds = ["full_attention"] * 3 + ["sliding_attention"] * 4
    assert read("gemma3", layer_types=kinds).decoder.sliding_layers == (False,) * 3 + (True,) * 4
    assert read("gemma3", sliding_window_pattern=2).decoder.sliding_layers == (
        (True, False) * 3 + (True,)
    )
    absent = read("gemma3", sliding_window_pattern=...).decoder
    assert absent.sliding_layers == (True,) * 5 + (False, True)


def test_auto_map_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """LO-07: custom code is ignored aloud."""
    with caplog.at_level(logging.WARNING):
        read("llama", auto_map={"AutoModel": "x.Y"})
    assert "auto_map" in caplog.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
ROPE = st.dictionaries(
    st.sampled_from(
        ["type", "rope_type", "factor", "original_max_position_embeddings", "beta_fast"]
    ),
    st.sampled_from(["yarn", "linear", "llama3", 1, 2.0, 0, "x"]) | JSON,
)
KEYS = sorted({key for architecture in ARCHITECTURES for key in hf_config(architecture)})
EXTRA = ["rope_scaling", "rope_parameters", "text_config", "layer_types", "quantization_config"]


@settings(max_examples=300, deadline=None)
@given(
    architecture=st.sampled_from([*ARCHITECTURES, "multimodal"]),
    changes=st.dictionaries(st.sampled_from([*KEYS, *EXTRA]), JSON | ROPE, max_size=4),
)
def test_any_json_is_read_or_refused(architecture: str, changes: dict[str, object]) -> None:
    """LO-12: whatever values config.json holds, the outcome is a configuration or a LoadError."""
    config = multimodal() if architecture == "multimodal" else hf_config(architecture)
    try:
        decoder = read_hf_config(config | changes, "config.json").decoder
    except LoadError:
        return
    assert decoder.num_heads % decoder.num_kv_heads == 0
    assert decoder.num_layers <= 1000
    assert decoder.max_position >= 1
    build_rope(decoder.rope)
