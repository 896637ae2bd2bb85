"""Thousands of small worlds on the real scheduler, cache and engine core.

A failure names its seed; ``OCTAVO_SIM_SEED=<seed> pytest tests/simulation`` runs that world alone,
and ``OCTAVO_SIM_SEEDS=<count>`` changes how many are run.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace

import pytest

from octavo.core.ids import SequenceId, TokenId
from octavo.core.plan import ModelRunner, ModelRunnerOutput, SchedulerOutput
from octavo.core.request import FinishReason
from octavo.kvcache.manager import KVCacheManager
from support_simulation import Parts, World

NUM_BATCHES = 20
NUM_SEEDS = int(os.environ.get("OCTAVO_SIM_SEEDS", "2000"))
ONE_SEED = os.environ.get("OCTAVO_SIM_SEED")


@pytest.fixture(autouse=True)
def _no_log_of_injected_faults(caplog: pytest.LogCaptureFixture) -> None:
    """Formatting a traceback for each injected fault would take most of the time."""
    caplog.set_level(logging.CRITICAL + 1, logger="octavo.engine.core")


def run_world(seed: int, parts: Parts | None = None) -> World:
    """Run one world; whatever goes wrong in it names the seed."""
    try:
        world = World(seed, parts)
        world.run()
    except Exception as error:
        raise AssertionError(f"OCTAVO_SIM_SEED={seed} fails: {error!r}") from error
    return world


@pytest.mark.parametrize("batch", range(1 if ONE_SEED else NUM_BATCHES))
def test_worlds(batch: int) -> None:
    """Turns red when any interleaving of arrivals, aborts, early finishes, preemptions and faults
    breaks an invariant, leaks, starves, ends twice, or changes one token of anybody's output."""
    seeds = [int(ONE_SEED)] if ONE_SEED else range(batch, NUM_SEEDS, NUM_BATCHES)
    for seed in seeds:
        run_world(seed)


def test_a_world_is_a_function_of_its_seed() -> None:
    """Turns red when anything but the seed decides, which would make failures irreproducible."""
    first, second = (run_world(11) for _ in range(2))
    assert first.tracked == second.tracked
    assert first.core.stats() == second.core.stats()


def test_the_worlds_are_not_all_harmless() -> None:
    """Turns red when the drawn worlds no longer reach what they are there to test."""
    worlds = [run_world(seed) for seed in range(60)]
    stats = [world.core.stats() for world in worlds]
    reasons = [item.stats.finish_reason for world in worlds for item in world.tracked.values()]
    assert sum(item.preemptions_total for item in stats) > 20
    assert sum(item.prefix_hits_total for item in stats) > 200
    assert sum(item.preempted_hits_total for item in stats) > 20
    assert sum(item.evictions_total for item in stats) > 200
    assert all(reasons.count(reason) > 20 for reason in FinishReason)


class Mutant:
    """A runner that executes a changed plan, or changes what comes of it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Execute the plan with the fault of this mutant."""
        return self.spoil(self._runner.execute(self.change(plan)))

    def change(self, plan: SchedulerOutput) -> SchedulerOutput:
        """Return the plan that is executed."""
        return plan

    def spoil(self, result: ModelRunnerOutput) -> ModelRunnerOutput:
        """Return the result that is reported."""
        return result


class SwapsTwoBlocks(Mutant):
    """Swaps the last two blocks of a table whose earlier one holds KV already."""

    def change(self, plan: SchedulerOutput) -> SchedulerOutput:
        scheduled = tuple(
            item._replace(block_ids=(*item.block_ids[:-2], item.block_ids[-1], item.block_ids[-2]))
            if item.start > 0 and len(item.block_ids) >= 2
            else item
            for item in plan.scheduled
        )
        return replace(plan, scheduled=scheduled)


class ForgetsBlocks(Mutant):
    """Loses the block that a running sequence grows by."""

    def change(self, plan: SchedulerOutput) -> SchedulerOutput:
        scheduled = tuple(
            item._replace(block_ids=item.block_ids if item.first_block == 0 else ())
            for item in plan.scheduled
        )
        return replace(plan, scheduled=scheduled)


class NeverReleases(Mutant):
    """Keeps the rows of sequences that ended."""

    def change(self, plan: SchedulerOutput) -> SchedulerOutput:
        return replace(plan, released=())


class MixesUpTwoRows(Mutant):
    """Gives the last two sequences of a batch each other's token."""

    def spoil(self, result: ModelRunnerOutput) -> ModelRunnerOutput:
        sampled = dict[SequenceId, tuple[TokenId, ...]](result.sampled)
        if len(sampled) >= 2:
            *_, first, second = sampled
            sampled[first], sampled[second] = sampled[second], sampled[first]
        return replace(result, sampled=sampled)


class LeaksBlocks(KVCacheManager):
    """Forgets to release the blocks of a sequence that used more than three."""

    def free(self, sequence_id: SequenceId) -> None:
        if len(self.tables[sequence_id].block_ids) > 3:
            del self._tables[sequence_id]
        else:
            super().free(sequence_id)


class CommitsTooEarly(KVCacheManager):
    """Offers a block to others before its last token is computed."""

    def commit(
        self, sequence_id: SequenceId, token_ids: Sequence[TokenId], num_computed: int
    ) -> None:
        super().commit(sequence_id, token_ids, min(len(token_ids), num_computed + 1))


class CommitsOtherTokens(KVCacheManager):
    """Files a block under tokens that are not those whose KV it holds."""

    def commit(
        self, sequence_id: SequenceId, token_ids: Sequence[TokenId], num_computed: int
    ) -> None:
        super().commit(sequence_id, [0, *token_ids[1:]], num_computed)


def failure(seed: int, parts: Parts) -> str | None:
    """Return why a world fails, None if it does not."""
    try:
        run_world(seed, parts)
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "parts",
    [
        *(
            pytest.param(Parts(runner=mutant), id=mutant.__name__)
            for mutant in (SwapsTwoBlocks, ForgetsBlocks, NeverReleases, MixesUpTwoRows)
        ),
        *(
            pytest.param(Parts(manager=mutant), id=mutant.__name__)
            for mutant in (LeaksBlocks, CommitsTooEarly, CommitsOtherTokens)
        ),
    ],
)
def test_a_planted_bug_is_found_within_few_worlds(parts: Parts) -> None:
    """Turns red when the simulation no longer notices wrong KV, leaks or mixed-up rows."""
    messages = [message for seed in range(40) if (message := failure(seed, parts))]
    assert messages
    assert all("OCTAVO_SIM_SEED=" in message for message in messages)
