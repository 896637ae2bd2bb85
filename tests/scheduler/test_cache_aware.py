"""The cache-aware queue: the longest cached prefix first, and nobody starves."""

import pytest

from octavo.core.errors import SettingError
from octavo.scheduler.policies import MAX_PASSES, QUEUE_POLICIES
from octavo.scheduler.try_order import WINDOW
from support_scheduler import Harness

WARM = list(range(12))
"""A prefix of three blocks that the tests cache first."""


def harness(policy: str = "cache-aware", **settings: object) -> Harness:
    """Return a scheduler that runs one sequence at a time and has ``WARM`` in its cache."""
    made = Harness(policy=policy, **{"max_num_seqs": 1, **settings})  # type: ignore[arg-type]
    made.add("first", [*WARM, 90], max_tokens=1)
    made.run()
    return made


def starts(made: Harness) -> list[str]:
    """Run; return the requests in the order in which they first ran."""
    made.run()
    first = made.finished
    return sorted(
        (name for name in first if name != "first"),
        key=lambda name: (first[name].first_scheduled_time, name),
    )


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", ["cold", "half", "warm"]), ("cache-aware", ["warm", "half", "cold"])],
)
def test_the_longest_match_runs_first(policy: str, order: list[str]) -> None:
    """Red if the order does not follow what is cached, or fcfs does."""
    made = harness(policy)
    made.add("cold", [70, 71, 72, 73, 74], max_tokens=2)
    made.add("half", [*WARM[:8], 80, 81], max_tokens=2)
    made.add("warm", [*WARM, 91, 92], max_tokens=2)
    assert starts(made) == order


def test_equal_matches_run_in_order_of_arrival() -> None:
    """Red if ties are settled by anything else."""
    made = harness()
    for index in range(6):
        made.add(f"r{index}", [*WARM, 40 + index], max_tokens=2)
    assert starts(made) == [f"r{index}" for index in range(6)]


def test_a_cold_request_is_passed_over_a_bounded_number_of_times() -> None:
    """Red if a stream of hits can starve a miss: after ``MAX_PASSES`` of them it runs."""
    made = harness()
    made.add("cold", [70, 71, 72, 73, 74], max_tokens=2)
    for index in range(3 * MAX_PASSES):
        made.add(f"w{index:02}", [*WARM, 40 + index], max_tokens=1)
    order = starts(made)
    assert order.index("cold") == MAX_PASSES


def test_the_overdue_run_in_order_of_arrival() -> None:
    """Red if the bound holds for one of several misses only."""
    made = harness()
    for name in ("cold0", "cold1", "cold2"):
        made.add(name, [70 + int(name[-1]), 60, 61, 62, 63], max_tokens=1)
    for index in range(3 * MAX_PASSES):
        made.add(f"w{index:02}", [*WARM, 40 + index], max_tokens=1)
    order = starts(made)
    assert order[MAX_PASSES : MAX_PASSES + 3] == ["cold0", "cold1", "cold2"]


def test_only_the_head_of_the_queue_is_reordered() -> None:
    """Red if a long queue makes each step look up every request in it."""
    made = harness()
    for index in range(WINDOW):
        made.add(f"c{index:02}", [50 + index, 1, 2], max_tokens=1)
    made.add("late", [*WARM, 90, 91], max_tokens=1)
    order = starts(made)
    assert order.index("late") == 1


def test_a_preempted_sequence_goes_before_any_hit() -> None:
    """Red if work that was begun waits for requests that were not (SC-04)."""
    made = harness(num_blocks=8, max_num_seqs=2)
    made.add("a", [70, 71, 72, 73, 74, 75], max_tokens=20)
    made.add("b", [60, 61, 62, 63, 64, 65], max_tokens=20)
    while not made.scheduler.stats().preemptions_total:
        made.step()
    made.add("warm", [*WARM, 90, 91], max_tokens=1)
    made.run()
    assert made.finished["warm"].first_scheduled_time > made.finished["b"].last_token_time - 0.2
    made.assert_idle()


def test_an_unknown_policy_is_refused_by_name() -> None:
    """Red if a typo starts a server with another order."""
    with pytest.raises(SettingError, match="must be one of fcfs, priority, cache-aware"):
        QUEUE_POLICIES.create("cache_aware")
