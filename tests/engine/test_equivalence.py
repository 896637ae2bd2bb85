"""However a request is computed, it gets the same answer: the laws of a KV cache, end to end.

Real arithmetic on a tiny random model. Sums of floats depend on the shape of a batch, so two
ways may part where the two likeliest tokens are a hair apart, and nowhere else.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.request import FinishReason
from octavo.core.sampling import SamplingParams
from octavo.engine.llm import LLM
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.kernels.native.loading import is_built
from support_loading import write_hf_folder

NEAR_TIE = 1e-3
LOGPROB_TOLERANCE = 1e-3
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_hf_folder(root / name, name) for name in ARCHITECTURES}


@pytest.fixture(params=["numpy", "native"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each law holds for each backend, in float32 unless a test says otherwise."""
    if request.param == "native" and not is_built():
        pytest.skip("the native backend was not built")
    monkeypatch.setitem(DEFAULTS, "backend", request.param)
    return str(request.param)


DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 8 << 20,
    "max_model_len": 128,
    "seed": 1,
}


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), debug_invariants=True, **{**DEFAULTS, **settings})


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, length).tolist() for length in lengths]


def greedy(max_tokens: int = 12, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2, **changes)


def one_by_one(llm: LLM, prompts: Sequence[list[int]], **sampling: Any) -> list[RequestOutput]:
    return [llm.generate(prompt, greedy(**sampling), use_tqdm=False)[0] for prompt in prompts]


def together(llm: LLM, prompts: Sequence[list[int]], **sampling: Any) -> list[RequestOutput]:
    return llm.generate(prompts, greedy(**sampling), use_tqdm=False)


def assert_same(one: Sequence[RequestOutput], other: Sequence[RequestOutput]) -> None:
    for a, b in zip(one, other, strict=True):
        assert_same_completion(a.outputs[0], b.outputs[0])


def assert_same_completion(a: CompletionOutput, b: CompletionOutput) -> None:
    assert a.logprobs is not None
    assert b.logprobs is not None
    for x, y in zip(a.logprobs, b.logprobs, strict=False):
        if x.token_id != y.token_id:
            gap = x.top[0][1] - x.top[1][1]
            assert gap < NEAR_TIE, f"parted at a gap of {gap}"
            return
        assert abs(x.logprob - y.logprob) < LOGPROB_TOLERANCE
    assert len(a.token_ids) == len(b.token_ids)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cached_equals_uncached(folders: dict[str, Path], architecture: str) -> None:
    """KV-18: turns red when positions, windows or blocks of a resumed prompt are wrong."""
    prompts = prompts_of(range(3, 63, 5))
    llm = engine(folders[architecture])
    cold = one_by_one(llm, prompts)
    warm = one_by_one(llm, prompts)
    off = one_by_one(engine(folders[architecture], enable_prefix_caching=False), prompts)
    assert_same(cold, warm)
    assert_same(cold, off)
    # The answer fills up the block that the prompt ends in, which can then be copied.
    filled = [len(out.prompt_token_ids) + len(out.outputs[0].token_ids) - 1 for out in cold]
    assert [out.num_cached_tokens for out in warm] == [
        min(len(prompt) - 1, num_filled // 16 * 16)
        for prompt, num_filled in zip(prompts, filled, strict=True)
    ]
    assert not any(out.num_cached_tokens for out in off)


@pytest.mark.parametrize(("length", "cached"), [(1500, 1499), (1504, 1503), (1505, 1504)])
def test_a_long_prompt_twice(
    tmp_path_factory: pytest.TempPathFactory, length: int, cached: int
) -> None:
    """Turns red when the second of two long prompts computes more than its last token."""
    folder = write_hf_folder(
        tmp_path_factory.mktemp("long") / "llama",
        "llama",
        config_overrides={"max_position_embeddings": 2048},
    )
    llm = engine(folder, max_model_len=2048)
    (prompt,) = prompts_of([length])
    first, second = one_by_one(llm, [prompt, prompt])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
    assert_same([first], [second])


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_a_wholly_cached_prompt_is_still_scored(folders: dict[str, Path], length: int) -> None:
    """KV-01: turns red when the last block's registration or its recompute is off by one."""
    (prompt,) = prompts_of([length])
    llm = engine(folders["llama"])
    first, second = one_by_one(llm, [prompt, prompt], max_tokens=4)
    assert_same([first], [second])
    assert second.num_cached_tokens < length
    longer = llm.generate([*prompt, 7, 8, 9], greedy(4), use_tqdm=False)[0]
    assert length // 16 * 16 <= longer.num_cached_tokens <= length


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("budget", [3, 16, 29])
def test_chunked_equals_whole(folders: dict[str, Path], architecture: str, budget: int) -> None:
    """Turns red when a chunk of a prompt sees too little or too much of what came before."""
    prompts = prompts_of([5, 16, 40, 61])
    whole = together(engine(folders[architecture]), prompts)
    chunked = engine(folders[architecture], max_num_batched_tokens=budget, max_num_seqs=3)
    assert_same(whole, together(chunked, prompts))


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_batched_equals_alone(folders: dict[str, Path], block_size: int) -> None:
    """KV-20: turns red when rows of a ragged batch read each other's slots at some block size."""
    prompts = prompts_of([5, 16, 37])
    alone = one_by_one(engine(folders["llama"]), prompts)
    batched = together(engine(folders["llama"], block_size=block_size), prompts)
    assert_same(alone, batched)


def test_answers_do_not_depend_on_the_crowd(folders: dict[str, Path]) -> None:
    """SA-01: turns red when requests of one batch contaminate each other."""
    prompts = prompts_of([9, 17, 30, 44, 58])
    crowd = prompts_of([3 + number % 40 for number in range(45)], seed=9)
    llm = engine(folders["qwen3"], enable_prefix_caching=False)
    alone = [one_by_one(llm, prompts) for _ in range(2)]
    assert [o.outputs[0].token_ids for o in alone[0]] == [o.outputs[0].token_ids for o in alone[1]]
    assert_same(alone[0], together(llm, [*prompts, *crowd])[: len(prompts)])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_preempted_equals_undisturbed(folders: dict[str, Path], architecture: str) -> None:
    """SC-05: turns red when preemption loses or repeats a token, or never ends."""
    prompts = prompts_of([20, 21, 22, 23])
    roomy = engine(folders[architecture], block_size=4)
    tight = engine(folders[architecture], block_size=4, **tight_pool(roomy, num_blocks=17))
    undisturbed = together(roomy, prompts, max_tokens=40)
    assert_same(undisturbed, together(tight, prompts, max_tokens=40))
    stats = tight.parts.core.stats()
    assert stats.preemptions_total > 0
    assert stats.usage.num_used == 0


def tight_pool(roomy: LLM, num_blocks: int) -> dict[str, int]:
    block_bytes = (8 << 20) // roomy.parts.info.num_blocks
    return {"kv_cache_memory_bytes": num_blocks * block_bytes}


def test_seeded_samples_do_not_depend_on_the_crowd(folders: dict[str, Path]) -> None:
    """SA-05: turns red when a batch-mate or a preemption moves a request's random stream."""
    (prompt,) = prompts_of([24])
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=30)
    roomy = engine(folders["llama"], block_size=4)
    tight = engine(folders["llama"], block_size=4, **tight_pool(roomy, num_blocks=16))
    mates = [SamplingParams(temperature=0.8, max_tokens=30, seed=seed) for seed in (None, 7, None)]
    others = prompts_of([22, 23, 25], seed=3)
    runs = [
        roomy.generate(prompt, seeded, use_tqdm=False)[0],
        *(
            llm.generate([*others, prompt], [*mates, seeded], use_tqdm=False)[-1]
            for llm in (roomy, roomy, tight)
        ),
    ]
    assert tight.parts.core.stats().preemptions_total > 0
    assert len({run.outputs[0].token_ids for run in runs}) == 1


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33])
def test_prompt_logprobs_of_cached_prompts(folders: dict[str, Path], length: int) -> None:
    """SA-17: turns red when a cached prefix leaves prompt tokens without logprobs."""
    (prompt,) = prompts_of([length])
    llm = engine(folders["llama"], max_num_batched_tokens=8, max_num_seqs=2)
    plain = llm.generate(prompt, greedy(2), use_tqdm=False)[0]
    scored = [
        llm.generate(prompt, greedy(2, prompt_logprobs=1), use_tqdm=False)[0] for _ in range(2)
    ]
    assert_same([plain, plain], scored)
    for out in scored:
        assert out.prompt_logprobs is not None
        assert len(out.prompt_logprobs) == length
        assert out.prompt_logprobs[0] is None
        assert [item.token_id for item in out.prompt_logprobs[1:]] == prompt[1:]
    first, second = ([i.logprob for i in out.prompt_logprobs[1:]] for out in scored)
    assert first == pytest.approx(second, abs=LOGPROB_TOLERANCE)


def test_more_logprobs_than_tokens(folders: dict[str, Path]) -> None:
    """SA-12: turns red when more entries than the vocabulary has are refused, or break the step."""
    llm = engine(folders["llama"])
    size = llm.parts.info.vocab_size
    asked = SamplingParams(temperature=0, max_tokens=2, logprobs=10**6, prompt_logprobs=10**6)
    out = llm.generate([1, 2, 3], asked, use_tqdm=False)[0]
    assert out.outputs[0].logprobs is not None
    assert out.prompt_logprobs is not None
    for entry in [*out.outputs[0].logprobs, *out.prompt_logprobs[1:]]:
        assert entry is not None
        assert len(entry.top) == size


def test_scoring_without_generating(folders: dict[str, Path]) -> None:
    """SC-16: turns red when max_tokens 0 generates a token or is refused."""
    (prompt,) = prompts_of([20])
    llm = engine(folders["llama"])
    out = llm.generate(prompt, greedy(0, prompt_logprobs=0), use_tqdm=False)[0]
    more = llm.generate(prompt, greedy(3, prompt_logprobs=0), use_tqdm=False)[0]
    assert out.outputs[0].token_ids == ()
    assert out.outputs[0].finish_reason is FinishReason.LENGTH
    assert [i.logprob for i in out.prompt_logprobs[1:]] == pytest.approx(
        [i.logprob for i in more.prompt_logprobs[1:]], abs=LOGPROB_TOLERANCE
    )


@pytest.mark.parametrize(
    ("formats", "caching", "chunked", "n"),
    [
        *itertools.product(
            (("float32", "auto"), ("bfloat16", "auto")), (True, False), (True, False), (1, 2)
        ),
        *itertools.product((("float32", "int8"),), (True, False), (True, False), (2,)),
    ],
)
def test_every_mix_of_features_answers_alike(
    folders: dict[str, Path], formats: tuple[str, str], caching: bool, chunked: bool, n: int
) -> None:
    """KV-21: turns red when two features that work alone break each other."""
    (shared,) = prompts_of([33])
    distinct = [shared + [number] * (number % 5) for number in range(12)]
    prompts = [distinct[number % 12] for number in range(50)]
    dtype, kv_cache_dtype = formats
    llm = engine(
        folders["llama"],
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=20,
        max_num_seqs=12,
    )
    plain = engine(
        folders["llama"], dtype=dtype, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False
    )
    outputs = llm.generate(prompts, greedy(6, n=n), use_tqdm=False)
    expected = one_by_one(plain, distinct, max_tokens=6)
    for index in range(n):
        for number, got in enumerate(outputs):
            assert_same_completion(expected[number % 12].outputs[0], got.outputs[index])
    assert llm.parts.core.stats().usage.num_used == 0


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("caching", [True, False])
def test_forked_equals_separate(folders: dict[str, Path], architecture: str, caching: bool) -> None:
    """Turns red when a branch reads or overwrites the KV of another, or draws from its seed."""
    llm = engine(folders[architecture], enable_prefix_caching=caching)
    for length in (15, 16, 17, 40):
        (prompt,) = prompts_of([length], seed=length)
        asked = {"temperature": 1.0, "max_tokens": 20, "logprobs": 1}
        forked = llm.generate(prompt, SamplingParams(n=4, seed=7, **asked), use_tqdm=False)[0]
        texts = {completion.token_ids for completion in forked.outputs}
        assert len(texts) == 4
        for index, completion in enumerate(forked.outputs):
            params = SamplingParams(seed=7 + index, **asked)
            alone = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
            assert alone.token_ids == completion.token_ids
            assert alone.logprobs is not None
            assert completion.logprobs is not None
            for one, other in zip(alone.logprobs, completion.logprobs, strict=True):
                assert abs(one.logprob - other.logprob) < LOGPROB_TOLERANCE


def test_best_of_returns_the_likeliest_samples(folders: dict[str, Path]) -> None:
    """Turns red when the ranking is not by the sum of logprobs, or shows what was not asked."""
    llm = engine(folders["llama"])
    (prompt,) = prompts_of([20])
    asked = {"temperature": 1.0, "max_tokens": 8, "seed": 3}
    every = llm.generate(prompt, SamplingParams(n=6, logprobs=0, **asked), use_tqdm=False)[0]
    ranked = sorted(every.outputs, key=lambda output: -(output.cumulative_logprob or 0.0))
    best = llm.generate(prompt, SamplingParams(n=2, best_of=6, **asked), use_tqdm=False)[0]
    assert [o.token_ids for o in best.outputs] == [o.token_ids for o in ranked[:2]]
    assert [o.index for o in best.outputs] == [0, 1]
    assert all(output.logprobs is None for output in best.outputs)


def test_a_stop_string_in_one_branch_leaves_the_others(folders: dict[str, Path]) -> None:
    """Turns red when ending one of n completions ends or changes another."""
    llm = engine(folders["llama"])
    (prompt,) = prompts_of([20])
    asked = {"n": 3, "temperature": 1.0, "max_tokens": 12, "seed": 11}
    free = llm.generate(prompt, SamplingParams(**asked), use_tqdm=False)[0].outputs
    stop = free[1].text[3:6]
    stopped = llm.generate(prompt, SamplingParams(stop=(stop,), **asked), use_tqdm=False)[0]
    for before, after in zip(free, stopped.outputs, strict=True):
        cut, found, _ = before.text.partition(stop)
        assert after.text == cut
        assert (after.stop_reason == stop) == bool(found)
    assert llm.parts.core.stats().usage.num_used == 0
