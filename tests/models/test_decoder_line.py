"""A decoder is a straight line of calls: recorded once, it can be replayed for any batch."""

from typing import Any

import numpy as np
import pytest

from octavo.kernels.numpy_backend import NumpyBackend
from octavo.kernels.numpy_ops import NumpyStep
from octavo.kernels.ops import Array, Ops
from octavo.models.config import DecoderConfig, RopeConfig
from octavo.models.decoder import build_decoder
from support_models import PagedDriver, random_tensors, tiny_config

CONFIGS: dict[str, DecoderConfig] = {
    "llama": tiny_config(),
    "qwen2": tiny_config(architecture="qwen2", tied_embeddings=True),
    "qwen3": tiny_config(architecture="qwen3"),
    "gemma3": tiny_config(
        architecture="gemma3",
        num_layers=4,
        activation="gelu_tanh",
        local_rope=RopeConfig(100.0, 12),
        sliding_window=6,
        sliding_layers=(True, False, True, True),
        logits_softcap=4.0,
        attention_softcap=2.0,
        embedding_scale=32**0.5,
        norm_offset=1.0,
        tied_embeddings=True,
    ),
}
QKV = ("attn_q", "attn_k", "attn_v")


class Opaque:
    """The result of a recorded call; looking into it is an error."""

    def __init__(self, number: int) -> None:
        self.number = number

    def _refuse(self, *_: object) -> Any:
        raise AssertionError("the decoder looked into an array")

    __bool__ = __len__ = __iter__ = __getitem__ = __array__ = __float__ = __int__ = _refuse
    __add__ = __mul__ = __matmul__ = __eq__ = __lt__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class Recorder:
    """An ``Ops`` that computes nothing and notes each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Opaque:
            self.calls.append((name, args, kwargs))
            return Opaque(len(self.calls) - 1)

        return call

    def replay(self, ops: Ops) -> Array:
        """Make the noted calls on another ``Ops``."""
        results: list[Any] = []
        for name, args, kwargs in self.calls:
            args = tuple(results[a.number] if isinstance(a, Opaque) else a for a in args)
            results.append(getattr(ops, name)(*args, **kwargs))
        return results[-1]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_recorded_line_serves_every_batch(name: str) -> None:
    """Red if a decoder branches on values or sizes: replays equal direct runs on unlike batches."""
    config = CONFIGS[name]
    biased = QKV if config.architecture == "qwen2" else ()
    backend = NumpyBackend()
    decoder = build_decoder(config, random_tensors(config, biased=biased), backend)
    recorder = Recorder()
    result = decoder.forward(recorder)  # type: ignore[arg-type]
    assert isinstance(result, Opaque)
    assert result.number == len(recorder.calls) - 1
    assert recorder.calls[-1][0] == "logits"
    tokens = np.random.default_rng(3).integers(0, config.vocab_size, 40).tolist()
    spec = decoder.kv_spec(4, "float32")
    direct = PagedDriver(backend, decoder.forward, spec)
    for driver in (direct, PagedDriver(NumpyBackend(), recorder.replay, spec)):
        driver.add("a", tokens)
        driver.add("b", tokens[5:])
    replayed = driver
    for work in ([("a", 9)], [("a", 1), ("b", 20)], [("b", 1), ("a", 1)]):
        for ours, theirs in zip(replayed.step(*work), direct.step(*work), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_call_is_one_of_the_contract(name: str) -> None:
    """A decoder asks for nothing that ``Ops`` does not promise, with the promised arguments."""
    import inspect

    config = CONFIGS[name]
    decoder = build_decoder(config, random_tensors(config), NumpyBackend())
    recorder = Recorder()
    decoder.forward(recorder)  # type: ignore[arg-type]
    for method, args, kwargs in recorder.calls:
        inspect.signature(getattr(Ops, method)).bind(None, *args, **kwargs)
        assert hasattr(NumpyStep, method)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_of_the_layout_changes_the_logits(name: str) -> None:
    """Red if the decoder forgets a tensor that the checkpoint lets pass (a bias, a norm)."""
    config = CONFIGS[name]
    biased = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors = random_tensors(config, biased=biased)

    def logits(changed: str | None) -> Any:
        weights = dict(tensors)
        if changed is not None:
            # k biases shift all scores of a query alike unless they differ: change one value.
            stored = tensors[changed]
            values = stored.data.view(np.float32).copy()
            values[0, 0] += 1.0
            weights[changed] = type(stored)(
                stored.name, stored.encoding, stored.shape, values.view(np.uint8)
            )
        backend = NumpyBackend()
        decoder = build_decoder(config, weights, backend)
        driver = PagedDriver(backend, decoder.forward, decoder.kv_spec(4, "float32"))
        driver.add("a", range(12))
        return driver.step(("a", 12))[0]

    base = logits(None)
    for changed in tensors:
        assert not np.array_equal(logits(changed), base), changed
