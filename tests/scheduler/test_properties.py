"""Any interleaving of arrivals, aborts, finishes, faults and steps keeps every law."""

import hypothesis.strategies as st
from hypothesis import HealthCheck, note, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.config import CacheConfig
from octavo.core.errors import ContextLengthError, GenerationError, InvalidRequestError
from octavo.core.ids import RequestId
from octavo.core.plan import SchedulerOutput
from octavo.core.request import CacheIdentity, FinishReason
from octavo.core.sampling import SamplingParams
from octavo.kvcache.keys import blake2b
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler.invariants import check_scheduler
from support_scheduler import IDENTITY, Harness, Row, chain, completion, search_alone

VOCAB = 2
NUM_BLOCKS = 6
OTHER = CacheIdentity(model="m", tokenizer="t", kv_dtype="float32", tenant="other")


def seeded(row: Row, kv: int) -> int:
    """Choose by the branch's own seed."""
    return chain(kv, row.new.seed) % VOCAB


def sampled(prompt, max_tokens, seed):
    """Return what a branch generates when nothing disturbs it."""
    kv = 0
    for token in prompt:
        kv = chain(kv, token)
    output = []
    while len(output) < max_tokens:
        output.append(chain(kv, seed) % VOCAB)
        kv = chain(kv, output[-1])
    return output


class SchedulerMachine(RuleBasedStateMachine):
    """Six blocks and two tokens: prefixes collide and the pool runs out all the time.

    Completions fork, beams are pruned, parts of a request are preempted, evicted and aborted.
    """

    @initialize(
        block_size=st.integers(1, 3),
        budget=st.integers(3, 8),
        max_num_seqs=st.integers(1, 3),
        policy=st.sampled_from(["fcfs", "priority", "cache-aware"]),
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
            choose=seeded,
        )
        self.scheduler = self.harness.scheduler
        self.plan: SchedulerOutput | None = None
        self.requests: dict[str, tuple[list[int], int, SamplingParams]] = {}

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
        max_tokens=st.integers(0, 6),
        priority=st.integers(0, 2),
        foreign=st.booleans(),
        scores=st.booleans(),
        n=st.sampled_from([1, 1, 2, 3]),
        beams=st.sampled_from([False, False, True]),
    )
    def add(self, prompt, max_tokens, priority, foreign, scores, n, beams):
        name = f"r{len(self.requests)}"
        slots = self.harness.manager.num_slots
        fits = len(prompt) + max(max_tokens - 1, 0) <= slots
        asked = {
            "n": n,
            "use_beam_search": beams,
            "temperature": 0.0 if beams else 1.0,
            "prompt_logprobs": 1 if scores else None,
            "seed": 5,
        }
        try:
            self.harness.add(
                name,
                prompt,
                max_tokens=max_tokens,
                priority=priority,
                identity=OTHER if foreign else IDENTITY,
                **asked,
            )
        except ContextLengthError:
            assert not fits or beams
            return
        except InvalidRequestError:  # more beams than places or tokens
            assert beams
            assert n > min(self.harness.config.max_num_seqs, VOCAB)
            return
        assert fits
        self.requests[name] = (prompt, max_tokens, SamplingParams(**asked))

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
        update = self.harness.execute(plan)
        failed = [o for o in update.outputs if o.finish_reason is FinishReason.ERROR]
        assert len({output.request_id for output in failed}) <= (faulty is not None)

    @precondition(lambda self: self.plan is not None)
    @rule(ran=st.booleans())
    def fail(self, ran):
        """The runner raised, before or after it touched its memory.

        Forks of a sequence that left meanwhile were not made, and compute the prompt anew.
        """
        plan, self.plan = self.plan, None
        items = [i for i in plan.scheduled if i.sequence_id in self.scheduler.running]
        hit = {sequence_id for i in items for sequence_id in (i.sequence_id, *i.forks)}
        survivors = {
            name
            for name, group in self.scheduler.live.items()
            if not hit.issuperset(branch.sequence_id for branch in group.branches)
            and (group.beam is None or hit.isdisjoint(b.sequence_id for b in group.branches))
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
        self.harness.record(
            self.scheduler.fail(plan, GenerationError("boom"), self.harness.clock())
        )
        assert set(self.scheduler.live) == survivors

    @rule(data=st.data(), stop=st.booleans())
    def leave(self, data, stop):
        """Abort, or finish for a stop string, at any point: also between schedule and update."""
        if not self.scheduler.live:
            return
        name = data.draw(st.sampled_from(sorted(self.scheduler.live)))
        group = self.scheduler.live[RequestId(name)]
        note(group.tell())
        if stop and group.beam is None:
            index = data.draw(st.sampled_from([branch.index for branch in group.branches]))
            stats = self.scheduler.finish(
                RequestId(name), num_tokens=0, now=self.harness.clock(), index=index
            )
            self.harness.finished[completion(name, index)] = stats
            assert stats.finish_reason is FinishReason.STOP
        else:
            live = {branch.index for branch in group.branches}
            if group.beam is not None:
                live = set(range(group.request.sampling.n))
            ended = self.harness.abort(name)
            assert {stats.index for stats in ended} == live
            assert all(stats.finish_reason is FinishReason.ABORT for stats in ended)
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
        for name, (prompt, max_tokens, sampling) in self.requests.items():
            for index, expected in enumerate(self._expected(prompt, max_tokens, sampling)):
                self._check_completion(completion(name, index), prompt, expected)
            if self.harness.finished[name].finish_reason is FinishReason.LENGTH:
                self._check_scores(name, prompt)
        self.harness.assert_idle()

    def _expected(self, prompt, max_tokens, sampling):
        if not sampling.use_beam_search:
            return [sampled(prompt, max_tokens, sampling.seed + i) for i in range(sampling.n)]
        if not max_tokens:
            return [[]] * sampling.n
        found = search_alone(VOCAB, prompt, max_tokens=max_tokens, n=sampling.n)
        return [[token.token_id for token in hypothesis.tokens] for hypothesis in found]

    def _check_completion(self, name, prompt, expected):
        got = self.harness.tokens.get(name, [])
        assert got == expected[: len(got)]
        stats = self.harness.finished[name]
        if stats.finish_reason is FinishReason.LENGTH:
            assert got == expected
            assert len(got) == stats.num_generation_tokens
        assert stats.num_cached_tokens < len(prompt)
        assert stats.arrival_time <= stats.finish_time

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
