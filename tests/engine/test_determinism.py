"""``--deterministic``: a request's tokens and logprobs to the last bit, whatever happens around it.

The laws of equal answers (``test_equivalence``) hold up to near ties; these hold for every bit.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.errors import SettingError
from octavo.core.sampling import SamplingParams
from octavo.engine.llm import LLM
from octavo.engine.outputs import RequestOutput
from octavo.kernels.native.loading import is_built
from support_loading import write_hf_folder

pytestmark = pytest.mark.skipif(not is_built(), reason="the native backend was not built")

MAX_LEN = 1700
NEAR_TIE = 0.1
"""In nats: a last bit that differs can turn the rounding of an activation, a step of 8 bits."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    longer = {"max_position_embeddings": 2048}
    return {
        name: write_hf_folder(root / name, name, config_overrides=longer)
        for name in ("llama", "gemma3")
    }


def engine(model: Path | str, **settings: Any) -> LLM:
    chosen = {"max_model_len": MAX_LEN, "kv_cache_memory_bytes": 64 << 20, "seed": 1, **settings}
    return LLM(str(model), backend="native", **{"deterministic": True, **chosen})


def prompts_of(lengths: Sequence[int], rng: np.random.Generator) -> list[list[int]]:
    """Prompts of which some start as an earlier one does, to the token."""
    prompts: list[list[int]] = []
    for length in lengths:
        prompt = rng.integers(0, 256, length).tolist()
        if prompts and rng.random() < 0.6:
            other = prompts[int(rng.integers(len(prompts)))]
            kept = int(rng.integers(0, len(other)))
            prompt[:kept] = other[:kept][: len(prompt)]
        prompts.append(prompt)
    return prompts


def sampling_of(number: int) -> SamplingParams:
    """Greedy and sampled requests; those with the prompt's logprobs, too, hit no cache."""
    return SamplingParams(
        temperature=0.0 if number % 2 else 0.9,
        seed=number,
        max_tokens=12,
        logprobs=3,
        prompt_logprobs=1 if number % 3 == 2 else None,
        ignore_eos=True,
    )


def facts(out: RequestOutput) -> tuple[object, ...]:
    """All that a client sees, floats as they are."""
    completion = out.outputs[0]
    return completion.token_ids, completion.logprobs, out.prompt_logprobs


def alone(llm: LLM, prompts: Sequence[list[int]]) -> list[RequestOutput]:
    return [
        llm.generate(prompt, sampling_of(number), use_tqdm=False)[0]
        for number, prompt in enumerate(prompts)
    ]


def together(llm: LLM, prompts: Sequence[list[int]], order: Sequence[int]) -> list[RequestOutput]:
    asked = llm.generate(
        [prompts[i] for i in order], [sampling_of(i) for i in order], use_tqdm=False
    )
    return [asked[list(order).index(i)] for i in range(len(prompts))]


@pytest.mark.parametrize(
    ("architecture", "dtype", "kv_cache_dtype", "quantization", "seed"),
    [
        ("llama", "bfloat16", "auto", "none", 0),
        ("llama", "bfloat16", "int8", "int8", 1),
        ("gemma3", "float32", "auto", "none", 2),
        ("gemma3", "float32", "int8", "int8", 3),
        ("llama", "bfloat16", "auto", "int4", 4),
    ],
)
def test_no_bit_depends_on_what_else_is_computed(
    folders: dict[str, Path],
    architecture: str,
    dtype: str,
    kv_cache_dtype: str,
    quantization: str,
    seed: int,
) -> None:
    """Alone on one thread without a cache, against: batch-mates in random order, small chunks,
    prefixes that are cached, and more threads."""
    rng = np.random.default_rng(seed)
    prompts = prompts_of([3, 1500, 40, 700, 17, 1100, 90], rng)
    formats = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "quantization": quantization}
    plain = engine(folders[architecture], threads=1, enable_prefix_caching=False, **formats)
    wanted = [facts(out) for out in alone(plain, prompts)]
    runs = {
        "crowd": engine(folders[architecture], threads=2, **formats),
        "chunks": engine(
            folders[architecture], threads=3, max_num_batched_tokens=61, max_num_seqs=3, **formats
        ),
    }
    for name, llm in runs.items():
        for _ in range(2):  # the second time with a cache that is warm
            order = rng.permutation(len(prompts)).tolist()
            outputs = together(llm, prompts, order)
            assert [facts(out) for out in outputs] == wanted, name
        assert sum(out.num_cached_tokens for out in outputs) > 0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_preempted_request_keeps_its_bits(folders: dict[str, Path], kv_cache_dtype: str) -> None:
    """Answers that were decoded are recomputed as prompts: red if a chunk gives other bits."""
    prompts = prompts_of([600, 603, 606, 609], np.random.default_rng(11))
    asked = SamplingParams(temperature=0.0, max_tokens=40, logprobs=3, ignore_eos=True)
    sizes = {"block_size": 4, "max_model_len": 700, "kv_cache_dtype": kv_cache_dtype}
    roomy = engine(folders["llama"], **sizes)
    block_bytes = (64 << 20) // roomy.parts.info.num_blocks
    tight = engine(folders["llama"], kv_cache_memory_bytes=312 * block_bytes, **sizes)
    wanted = [roomy.generate(prompt, asked, use_tqdm=False)[0] for prompt in prompts]
    got = tight.generate(prompts, asked, use_tqdm=False)
    assert tight.parts.core.stats().preemptions_total > 0
    assert [facts(out) for out in got] == [facts(out) for out in wanted]


def test_hits_within_a_block_keep_the_bits(folders: dict[str, Path]) -> None:
    """A prompt that parts from a cached one in the middle of a block: red if the copied block or
    the chunk that starts inside it gives other bits than computing it all."""
    rng = np.random.default_rng(5)
    (first,) = prompts_of([620], rng)
    second = [*first[:603], *rng.integers(0, 256, 30).tolist()]
    cold = engine(folders["llama"], enable_prefix_caching=False)
    warm = engine(folders["llama"])
    (wanted,) = alone(cold, [second])
    alone(warm, [first])
    (got,) = alone(warm, [second])
    assert got.num_cached_tokens == 603
    assert facts(got) == facts(wanted)


def test_numpy_cannot_promise_it(folders: dict[str, Path]) -> None:
    """Red when the flag is accepted where sums depend on the batch."""
    with pytest.raises(SettingError, match="--deterministic needs the native backend"):
        LLM(str(folders["llama"]), backend="numpy", deterministic=True)


@pytest.mark.model
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_default_model_in_company(model_path: Path, deterministic: bool) -> None:
    """With the flag every bit of the default model's answers is the same in company; without it
    answers part at near ties only, if at all."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(20, 5000, length).tolist() for length in (900, 5, 64, 300)]
    asked = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2, ignore_eos=True)
    llm = engine(model_path, deterministic=deterministic, threads=2, max_num_batched_tokens=256)
    alone_ = [llm.generate(prompt, asked, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    crowd = [output.outputs[0] for output in llm.generate(prompts, asked, use_tqdm=False)]
    for one, other in zip(alone_, crowd, strict=True):
        if deterministic:
            assert one.token_ids == other.token_ids
            assert one.logprobs == other.logprobs
            continue
        assert one.logprobs is not None
        assert other.logprobs is not None
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            if a.token_id != b.token_id:
                assert a.top[0][1] - a.top[1][1] < NEAR_TIE
                break
            assert abs(a.logprob - b.logprob) < NEAR_TIE
