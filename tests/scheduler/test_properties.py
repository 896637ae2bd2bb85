"""Any interleaving of arrivals, aborts, finishes, faults and steps keeps every law."""

import hypothesis.strategies as st
from hypothesis import HealthCheck, note, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.config import CacheConfig
from octavo.core.errors import ContextLengthError
from octavo.core.ids import RequestId
from octavo.core.plan import SchedulerOutput
from octavo.core.request import CacheIdentity, FinishReason
from octavo.kvcache.keys import blake2b
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler.invariants import check_scheduler
from support_scheduler import IDENTITY, Harness, expected_output

VOCAB = 2
NUM_BLOCKS = 6
OTHER = CacheIdentity(model="m", tokenizer="t", kv_dtype="float32", tenant="other")


class SchedulerMachine(RuleBasedStateMachine):
    """Six blocks and two tokens: prefixes collide and the pool runs out all the time."""

    @initialize(
        block_size=st.integers(1, 3),
        budget=st.integers(3, 8),
        max_num_seqs=st.integers(1, 3),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        weak_digest=st.booleans(),
        watermark=st.sampled_from([0.0, 0.2]),
        threshold=st.integers(0, 3),
    )
    def start(
        self, block_size, budget, max_num_seqs, policy, caching, weak_digest, watermark, threshold
    ):
        digest = (lambda data: b"same") if weak_digest else blake2b
        config = CacheConfig(
            NUM_BLOCKS, block_size, enable_prefix_caching=caching, watermark=watermark
        )
        self.harness = Harness(
            manager=KVCacheManager(config, digest=digest),
            vocab_size=VOCAB,
            max_model_len=1 + NUM_BLOCKS * block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            policy=policy,
            threshold=threshold,
        )
        self.scheduler = self.harness.scheduler
        self.plan: SchedulerOutput | None = None
        self.requests: dict[str, tuple[list[int], int]] = {}

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
        max_tokens=st.integers(0, 6),
        priority=st.integers(0, 2),
        foreign=st.booleans(),
        scores=st.booleans(),
    )
    def add(self, prompt, max_tokens, priority, foreign, scores):
        name = f"r{len(self.requests)}"
        slots = self.harness.manager.num_slots
        fits = len(prompt) + max(max_tokens - 1, 0) <= slots
        try:
            self.harness.add(
                name,
                prompt,
                max_tokens=max_tokens,
                priority=priority,
                identity=OTHER if foreign else IDENTITY,
                prompt_logprobs=1 if scores else None,
            )
        except ContextLengthError:
            assert not fits
            return
        assert fits
        self.requests[name] = (prompt, max_tokens)

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self):
        self.plan = self.harness.schedule()

    @precondition(lambda self: self.plan is not None)
    @rule(data=st.data())
    def update(self, data):
        """Now and then one sequence of the plan has no usable result."""
        plan, self.plan = self.plan, None
        ids = [item.sequence_id for item in plan.scheduled]
        faulty = data.draw(st.sampled_from([*ids, None, None, None, None]))
        self.harness.oracle.failing = {} if faulty is None else {faulty: "NaN"}
        running = len(self.scheduler.running)
        update = self.harness.execute(plan)
        failed = [o for o in update.outputs if o.finish_reason is FinishReason.ERROR]
        assert len(failed) <= (faulty is not None) <= max(running, 1)

    @precondition(lambda self: self.plan is not None)
    @rule(ran=st.booleans())
    def fail(self, ran):
        """The runner raised, before or after it touched its memory."""
        plan, self.plan = self.plan, None
        survivors = set(self.scheduler.live) - {
            self.scheduler.running[item.sequence_id].request_id
            for item in plan.scheduled
            if item.sequence_id in self.scheduler.running
        }
        self.harness.oracle.execute(plan)
        if not ran:
            wiped = {
                (block, slot)
                for item in plan.scheduled
                for position in range(item.start, item.start + len(item.token_ids))
                for block, slot in [
                    self.harness.oracle._slot(self.harness.oracle.rows[item.sequence_id], position)
                ]
            }
            for place in wiped:
                self.harness.oracle.memory.pop(place, None)
        self.harness.record(self.scheduler.fail(plan, "boom", self.harness.clock()))
        assert set(self.scheduler.live) == survivors

    @rule(data=st.data(), stop=st.booleans())
    def leave(self, data, stop):
        """Abort, or finish for a stop string, at any point: also between schedule and update."""
        if not self.scheduler.live:
            return
        name = data.draw(st.sampled_from(sorted(self.scheduler.live)))
        note(self.scheduler.live[RequestId(name)].tell())
        if stop:
            stats = self.scheduler.finish(RequestId(name), num_tokens=0, now=self.harness.clock())
            self.harness.finished[name] = stats
            assert stats.finish_reason is FinishReason.STOP
        else:
            (stats,) = self.harness.abort(name)
            assert stats.finish_reason is FinishReason.ABORT
            assert not self.harness.abort(name)

    @invariant()
    def laws(self):
        if hasattr(self, "scheduler"):
            check_scheduler(self.scheduler)

    def teardown(self):
        """Whatever happened, all that is left finishes with the undisturbed tokens."""
        if not hasattr(self, "scheduler"):
            return
        self.harness.oracle.failing = {}
        if self.plan is not None:
            self.harness.execute(self.plan)
        self.harness.run(max_steps=600)
        for name, (prompt, max_tokens) in self.requests.items():
            got = self.harness.tokens[name]
            assert got == expected_output(prompt, max_tokens, VOCAB)[: len(got)]
            stats = self.harness.finished[name]
            if stats.finish_reason is FinishReason.LENGTH:
                assert len(got) == max_tokens == stats.num_generation_tokens
                self._check_scores(name, prompt)
            assert stats.num_cached_tokens < len(prompt)
            assert stats.arrival_time <= stats.finish_time
        self.harness.assert_idle()

    def _check_scores(self, name, prompt):
        first, *rest = self.harness.outputs[name]
        assert all(output.prompt_logprobs is None for output in rest)
        if first.prompt_logprobs is not None:
            assert [entry and entry.token_id for entry in first.prompt_logprobs] == [
                None,
                *prompt[1:],
            ]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
