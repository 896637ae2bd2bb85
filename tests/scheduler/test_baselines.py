"""The baselines: other batching, reservation and prefix caches give the same tokens."""

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from octavo.core.config import CacheConfig
from octavo.core.errors import ContextLengthError, InvariantError, SettingError
from octavo.core.ids import SequenceId
from octavo.core.request import FinishReason, Request
from octavo.core.sampling import SamplingParams
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler.reservation import KV_RESERVATIONS, Paged, final_num_slots
from octavo.scheduler.sequence import Sequence
from support_scheduler import IDENTITY, Harness, expected_output

VOCAB = 2
MAX_MODEL_LEN = 24
CONTIGUOUS = ("max", "pow2", "oracle")


@dataclass(frozen=True)
class Kind:
    """How a baseline differs from the default."""

    batching: str = "continuous"
    reservation: str = "paged"
    prefix_cache: str | None = None


KINDS = [
    *(Kind("static", reservation) for reservation in CONTIGUOUS),
    *(Kind("continuous", reservation) for reservation in CONTIGUOUS),
    Kind("static", "paged"),
    Kind("static", "paged", "radix"),
    Kind("continuous", "paged"),
    Kind("continuous", "paged", "flat"),
    Kind("static", "paged", "flat"),
]


def harness_of(kind, *, num_blocks=6, block_size=2, budget=8, max_num_seqs=3, watermark=0.0):
    """Return a scheduler of this kind that checks all invariants in each step."""
    config = CacheConfig(
        num_blocks,
        block_size,
        enable_prefix_caching=kind.prefix_cache is not None,
        prefix_cache=kind.prefix_cache or "radix",
        kv_reservation=kind.reservation,
        watermark=watermark,
    )
    return Harness(
        manager=KVCacheManager(config),
        vocab_size=VOCAB,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        batching=kind.batching,
    )


arrivals = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),  # prompt
        st.integers(0, 6),  # max_tokens
        st.integers(0, 4),  # steps until the next one
        st.sampled_from([None, None, None, 1, 3]),  # aborted so many steps later
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrivals=arrivals,
    block_size=st.integers(1, 3),
    budget=st.integers(3, 8),
    max_num_seqs=st.integers(1, 3),
    watermark=st.sampled_from([0.0, 0.2]),
)
def test_tokens_are_those_of_an_undisturbed_run(
    kind, arrivals, block_size, budget, max_num_seqs, watermark
):
    """In a pool of six blocks all finish with their own tokens, and every law holds each step."""
    harness = harness_of(
        kind,
        block_size=block_size,
        budget=budget,
        max_num_seqs=max_num_seqs,
        watermark=watermark,
    )
    asked, aborts = {}, {}
    for index, (prompt, max_tokens, pause, abort_after) in enumerate(arrivals):
        name = f"r{index}"
        try:
            harness.add(name, prompt, max_tokens=max_tokens)
        except ContextLengthError:
            continue
        asked[name] = prompt, max_tokens
        if abort_after is not None:
            aborts[name] = len(harness.plans) + abort_after
        for _ in range(pause):
            harness.step()
            for gone in [n for n, step in aborts.items() if step <= len(harness.plans)]:
                del aborts[gone]
                harness.abort(gone)
    harness.run(max_steps=1000)
    for name, (prompt, max_tokens) in asked.items():
        got = harness.tokens[name]
        assert got == expected_output(prompt, max_tokens, VOCAB)[: len(got)]
        if harness.reason(name) is FinishReason.LENGTH:
            assert len(got) == max_tokens
    harness.assert_idle()


@pytest.mark.parametrize("reservation", ["paged", *CONTIGUOUS])
def test_a_static_batch_takes_nobody_in(reservation):
    """Turns red if a request joins before the whole batch is done, though there is room."""
    harness = harness_of(Kind("static", reservation), num_blocks=40, budget=64, max_num_seqs=3)
    for index in range(7):
        harness.add(f"r{index}", [0, 1, index % VOCAB], max_tokens=2 + 3 * (index % 3))
    while harness.scheduler.has_work():
        before = len(harness.scheduler.running)
        plan = harness.schedule()
        assert not (plan.new and before), "a sequence joined a running batch"
        harness.execute(plan)
    sizes = [len(plan.new) for plan in harness.plans if plan.new]
    assert sizes == ([3, 3, 1] if reservation != "max" else sizes)
    assert sum(sizes) == 7


def test_continuous_batching_fills_a_freed_place_at_once():
    """The contrast: turns red if the test above would also pass with everything static."""
    harness = harness_of(Kind(), num_blocks=40, budget=64, max_num_seqs=2)
    for index, max_tokens in enumerate([1, 9, 1, 1]):
        harness.add(f"r{index}", [0, 1], max_tokens=max_tokens)
    joined = []
    while harness.scheduler.has_work():
        before = len(harness.scheduler.running)
        plan = harness.schedule()
        joined += [new.sequence_id for new in plan.new if before]
        harness.execute(plan)
    assert joined == [2, 3]


def sequence_of(num_prompt, max_tokens):
    """Return a waiting sequence."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    request = Request("r", tuple([0] * num_prompt), sampling, IDENTITY, 0.0)
    return Sequence(SequenceId(0), request, max_tokens, frozenset())


@pytest.mark.parametrize(
    ("name", "expected"), [("paged", 10), ("oracle", 34), ("pow2", 42), ("max", 2048)]
)
def test_reservations_are_the_papers(name, expected):
    """PagedAttention, 6.1: for an output of 25 tokens, Pow2 reserves 32 positions of output."""
    policy = KV_RESERVATIONS.create(name)
    assert policy.num_slots(sequence_of(10, 25), 2048) == expected
    if name == "pow2":
        assert policy.num_slots(sequence_of(10, 32), 2048) == 42, "32 is a power of two itself"


@given(num_prompt=st.integers(1, 300), max_tokens=st.integers(0, 300), spare=st.integers(0, 300))
def test_who_knows_more_reserves_less(num_prompt, max_tokens, spare):
    """oracle <= pow2 <= max, and each holds all that the sequence will ever need."""
    sequence = sequence_of(num_prompt, max_tokens)
    context = num_prompt + max(max_tokens, 1) + spare
    sizes = [KV_RESERVATIONS.create(n).num_slots(sequence, context) for n in CONTIGUOUS]
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) >= final_num_slots(sequence)
    output = max(max_tokens, 1)
    assert sizes[1] <= num_prompt + 2 * output


def test_a_reservation_larger_than_the_pool_takes_all_of_it():
    """Turns red if `max` with a pool below the context refuses or never starts a request."""
    harness = harness_of(Kind(reservation="max"), num_blocks=4)
    harness.add("a", [0, 1], max_tokens=3)
    harness.add("b", [1, 0], max_tokens=3)
    harness.step()
    assert len(harness.scheduler.running) == 1
    assert harness.manager.usage().num_free == 0
    harness.run()
    harness.assert_idle()


def test_contiguous_sequences_are_never_preempted():
    """Turns red if a reservation is smaller than what its sequence comes to need."""
    for reservation in CONTIGUOUS:
        harness = harness_of(Kind(reservation=reservation), num_blocks=12, budget=16)
        for index in range(8):
            harness.add(f"r{index}", [index % VOCAB] * (1 + index % 4), max_tokens=1 + index % 6)
        harness.run()
        assert harness.scheduler.stats().preemptions_total == 0


def test_a_run_does_not_grow():
    """Turns red if a sequence that outgrows its reservation gets blocks elsewhere."""
    harness = harness_of(Kind(reservation="oracle"))
    harness.scheduler._reservation = Paged()
    harness.add("a", [0, 1], max_tokens=6)
    with pytest.raises(InvariantError, match="outgrew"):
        harness.run()


def test_unknown_names_stop_the_start():
    """Turns red if a typo falls back to the default."""
    with pytest.raises(SettingError, match="--batching-policy"):
        harness_of(Kind("inflight"))
    with pytest.raises(SettingError, match="--kv-reservation"):
        harness_of(Kind(reservation="buddy"))


def test_occupancy_tells_the_kinds_of_waste():
    """One request of 3 + 4 tokens in blocks of 4: what each reservation leaves empty, and why."""
    found = {}
    for reservation in ("paged", *CONTIGUOUS):
        kind = Kind(reservation=reservation)
        harness = harness_of(kind, num_blocks=10, block_size=4, max_num_seqs=1)
        harness.add("a", [0, 1, 0], max_tokens=4)
        harness.add("b", [0, 1, 0], max_tokens=4)
        harness.step()
        seen = harness.scheduler.occupancy()
        found[reservation] = (
            seen.num_stored,
            seen.num_pending,
            seen.num_reserved,
            seen.num_internal,
        )
        assert sum(found[reservation]) == seen.num_allocated
        assert seen.waste_ratio == sum(found[reservation][2:]) / seen.num_allocated
        # b would take 24 slots under max; 16 are left, one run that is too short for it
        assert seen.num_external == (16 if reservation == "max" else 0)
    assert found == {
        "paged": (3, 1, 0, 0),
        "oracle": (3, 1, 2, 2),
        "pow2": (3, 1, 2, 2),
        "max": (3, 1, 2, 18),
    }


def test_a_prefill_under_way_is_no_waste():
    """Turns red if slots of prompt tokens to be computed count as stored, or as waste."""
    harness = harness_of(Kind(), num_blocks=10, block_size=4, budget=5)
    harness.add("a", [0, 1] * 5, max_tokens=3)
    harness.step()
    seen = harness.scheduler.occupancy()
    assert (seen.num_stored, seen.num_pending, seen.num_reserved) == (5, 5, 2)


def test_occupancy_counts_a_shared_block_once():
    """Turns red if sharing makes more slots than the pool has, or hides stored tokens."""
    harness = harness_of(Kind(prefix_cache="radix"), num_blocks=10, block_size=4, budget=64)
    prompt = [0, 1, 0, 0, 1, 1, 0, 1, 1]
    harness.add("a", prompt, max_tokens=9)
    harness.step()
    harness.add("b", prompt, max_tokens=9)
    harness.step()
    seen = harness.scheduler.occupancy()
    assert harness.manager.usage().num_used == 4
    assert seen.num_allocated == 16
    assert seen.num_stored == 8 + 2 + 1
    harness.run()
    assert harness.scheduler.occupancy().num_allocated == 0
    assert harness.scheduler.occupancy().waste_ratio == 0.0
