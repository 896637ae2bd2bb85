"""However tokens are cut into steps, batches and blocks, each sequence's logits are the same."""

import numpy as np
import pytest

from octavo.kernels.numpy_backend import NumpyBackend
from octavo.models.config import DecoderConfig, RopeConfig
from octavo.models.decoder import build_decoder
from support_models import PagedDriver, alone, decoder_driver, random_tensors, tiny_config

CONFIGS: dict[str, DecoderConfig] = {
    "full": tiny_config(),
    "sliding": tiny_config(sliding_window=7),
    "mixed": tiny_config(
        num_layers=3,
        num_kv_heads=1,
        sliding_window=9,
        sliding_layers=(True, False, True),
        local_rope=RopeConfig(50.0, 12),
        attention_softcap=1.0,
    ),
    "partial rotary": tiny_config(rope=RopeConfig(10000.0, 6)),
}
BLOCK_SIZES = [1, 16, 64]
CLOSE = {"rtol": 0, "atol": 2e-5}


def tokens(seed: int, count: int) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, 61, count).tolist()


def driver(name: str, block_size: int) -> PagedDriver:
    """A driver over a small random model."""
    config = CONFIGS[name]
    return decoder_driver(config, random_tensors(config), block_size=block_size, num_blocks=256)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("chunk", [1, 5, 16, 17])
def test_chunked_equals_whole(name: str, block_size: int, chunk: int) -> None:
    """A prompt computed in chunks of any size has the logits of one computed at once."""
    paged, prompt = driver(name, block_size), tokens(1, 50)
    whole = alone(paged, prompt)
    paged.add("a", prompt)
    cuts = [min(chunk, 50 - start) for start in range(0, 50, chunk)]
    parts = [paged.step(("a", cut))[0] for cut in cuts]
    np.testing.assert_allclose(np.concatenate(parts), whole, **CLOSE)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_batched_equals_alone(name: str, block_size: int) -> None:
    """KV-20: prompts of 5, 16 and 37 tokens in one batch, then decodes, each as if it were alone;
    the same for every block size."""
    paged = driver(name, block_size)
    prompts = {"a": tokens(2, 5 + 6), "b": tokens(3, 16 + 6), "c": tokens(4, 37 + 6)}
    wanted = {key: alone(paged, prompt) for key, prompt in prompts.items()}
    for key, prompt in prompts.items():
        paged.add(key, prompt)
    got = dict(zip(prompts, paged.step(("a", 5), ("b", 16), ("c", 37)), strict=True))
    for _ in range(6):
        for key, row in zip("cab", paged.step(("c", 1), ("a", 1), ("b", 1)), strict=True):
            got[key] = np.concatenate([got[key], row])
    for key, logits in wanted.items():
        np.testing.assert_allclose(got[key], logits, **CLOSE)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_cached_prefix_equals_computed(name: str, block_size: int) -> None:
    """A sequence on another's blocks has the logits of one that computed its prefix itself."""
    paged = driver(name, block_size)
    shared = tokens(5, 32)
    first, second = shared + tokens(6, 8), shared + tokens(7, 10)
    wanted = alone(paged, second)
    paged.add("first", first)
    paged.step(("first", 40))
    paged.share("second", second, "first", 32 // block_size)
    (got,) = paged.step(("second", 10))
    np.testing.assert_allclose(got, wanted[32:], **CLOSE)


@pytest.mark.parametrize("name", CONFIGS)
def test_random_schedules(name: str) -> None:
    """Any interleaving of chunks and decodes, sequences coming and going, changes no logits."""
    rng = np.random.default_rng(8)
    for block_size in (1, 3, 16):
        paged = driver(name, block_size)
        left: dict[str, int] = {}
        wanted, got = {}, {}
        for number in range(12):
            key, prompt = str(number), tokens(100 + number, int(rng.integers(1, 60)))
            wanted[key], got[key], left[key] = alone(paged, prompt), [], len(prompt)
            paged.add(key, prompt)
            chosen = [k for k in left if rng.random() < 0.7] or [key]
            work = [(k, int(rng.integers(1, 1 + min(left[k], 12)))) for k in chosen]
            for (k, count), part in zip(work, paged.step(*work), strict=True):
                got[k].append(part)
                left[k] -= count
                if left[k] == 0:
                    paged.release(k)
                    del left[k]
                    np.testing.assert_allclose(np.concatenate(got[k]), wanted[k], **CLOSE)


def test_only_wanted_rows_have_logits() -> None:
    """The head runs on the rows that sample, in their order, and on no others."""
    config = CONFIGS["full"]
    tensors = random_tensors(config)
    backend = NumpyBackend()
    decoder = build_decoder(config, tensors, backend)
    spec = decoder.kv_spec(16, "float32")
    every = decoder_driver(config, tensors)
    last = PagedDriver(backend, decoder.forward, spec)
    step = backend.compile(decoder.forward)
    for paged in (every, last):
        paged.add("a", tokens(9, 9))
        paged.add("b", tokens(10, 20))
    a, b = every.step(("a", 9), ("b", 20))
    got = step(last.batch(("a", 9), ("b", 20), all_logits=False))
    np.testing.assert_allclose(got, [a[-1], b[-1]], **CLOSE)


def test_bfloat16_stays_near_float32() -> None:
    """Weights and KV in bfloat16 move logits a little (they are rounded), and only a little."""
    config = CONFIGS["full"]
    tensors, prompt = random_tensors(config), tokens(11, 40)
    exact = alone(decoder_driver(config, tensors), prompt)
    backend = NumpyBackend("bfloat16")
    decoder = build_decoder(config, tensors, backend)
    rounded = alone(PagedDriver(backend, decoder.forward, decoder.kv_spec(16, "bfloat16")), prompt)
    off = np.abs(rounded - exact).max() / exact.std()
    assert 1e-4 < off < 0.1
