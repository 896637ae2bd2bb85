"""Fork, write, prune, preempt in part, wait, evict and abort in any order, on the cache itself."""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.config import CacheConfig
from octavo.core.ids import BlockId, SequenceId
from octavo.kvcache.eviction.registry import EVICTION_POLICIES
from octavo.kvcache.invariants import check_cache
from octavo.kvcache.keys import blake2b
from octavo.kvcache.manager import KVCacheManager
from support_cache import IDENTITY

NUM_BLOCKS = 6
TOKENS = st.integers(0, 1)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=9)


class CacheMachine(RuleBasedStateMachine):
    """Six blocks, two tokens, and a memory whose slots say which prefix their KV is of.

    A write into a block that others hold, a copy that is lost, late or in the wrong order, and a
    hit on another prefix all show as wrong KV of some sequence.
    """

    @initialize(
        block_size=st.integers(1, 3),
        policy=st.sampled_from(EVICTION_POLICIES.names),
        weak=st.booleans(),
    )
    def make(self, block_size, policy, weak):
        self.size = block_size
        digest = (lambda data: b"same") if weak else blake2b
        config = CacheConfig(
            NUM_BLOCKS, block_size, min_partial_hit=1, eviction_policy=policy, watermark=0.0
        )
        self.cache = KVCacheManager(config, digest=digest)
        self.memory: dict[tuple[BlockId, int], tuple[int, ...]] = {}
        self.tokens: dict[SequenceId, list[int]] = {}
        self.family: dict[SequenceId, int] = {}
        self.waiting: dict[SequenceId, list[int]] = {}
        self.num_sequences = 0

    def _next(self):
        self.num_sequences += 1
        return SequenceId(self.num_sequences)

    def _compute(self, sequence, start):
        """Make the pending copies, then write the KV of the tokens from ``start`` on."""
        for copy in self.cache.take_copies():
            for slot in range(self.size):
                self.memory.pop((copy.target, slot), None)
                if (copy.source, slot) in self.memory:
                    self.memory[copy.target, slot] = self.memory[copy.source, slot]
        tokens, blocks = self.tokens[sequence], self.cache.tables[sequence].block_ids
        for position in range(start, len(tokens)):
            index, slot = divmod(position, self.size)
            self.memory[blocks[index], slot] = tuple(tokens[: position + 1])
        self.cache.commit(sequence, tokens, len(tokens))

    def _free(self, sequence):
        self.cache.free(sequence)
        del self.family[sequence]
        return self.tokens.pop(sequence)

    def _pick(self, data):
        return data.draw(st.sampled_from(sorted(self.tokens)))

    @rule(prompt=PROMPTS)
    def admit(self, prompt):
        self._admit(self._next(), prompt)

    def _admit(self, sequence, prompt):
        hit = self.cache.match(IDENTITY, prompt)
        assert hit.num_tokens < len(prompt)
        admitted = self.cache.admit(sequence, hit, len(prompt))
        if admitted:
            self.tokens[sequence], self.family[sequence] = list(prompt), sequence
            self._compute(sequence, hit.num_tokens)
        return admitted

    @rule(prompt=PROMPTS)
    def wait(self, prompt):
        """What is waited for is computed and evicted in every order meanwhile."""
        self._wait(self._next(), prompt)

    def _wait(self, sequence, prompt):
        self.waiting[sequence] = prompt
        self.cache.expect(sequence, IDENTITY, prompt)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data):
        parent, child = self._pick(data), self._next()
        before = self.cache.usage()
        self.cache.fork(parent, child, len(self.tokens[parent]))
        assert self.cache.usage() == before
        self.tokens[child] = list(self.tokens[parent])
        self.family[child] = self.family[parent]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), new=st.lists(TOKENS, min_size=1, max_size=3))
    def write(self, data, new):
        sequence = self._pick(data)
        start = len(self.tokens[sequence])
        if self.cache.extend(sequence, start + len(new), start):
            self.tokens[sequence] += new
            self._compute(sequence, start)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def prune(self, data):
        """A beam that none continues."""
        self._free(self._pick(data))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def preempt_part(self, data):
        """Blocks that the rest of the family holds do not come back."""
        victim = self._pick(data)
        table = self.cache.tables[victim].block_ids
        others = {b for s, t in self.cache.tables.items() if s != victim for b in t.block_ids}
        before = self.cache.usage().num_used
        self._wait(victim, self._free(victim))
        assert before - self.cache.usage().num_used == len(set(table) - others)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def resume(self, data):
        sequence = data.draw(st.sampled_from(sorted(self.waiting)))
        if self._admit(sequence, self.waiting[sequence]):
            del self.waiting[sequence]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data):
        sequence = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[sequence]
        self.cache.unexpect(sequence)

    @rule()
    def reset(self):
        assert self.cache.reset() == (not self.tokens)

    @precondition(lambda self: next(self.cache.eviction_candidates(), None) is not None)
    @rule()
    def evict(self):
        before = self.cache.usage()
        self.cache._evictor.evict()
        after = self.cache.usage()
        assert (after.num_free, after.num_used) == (before.num_free + 1, before.num_used)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def abort(self, data):
        """A whole family leaves."""
        family = self.family[self._pick(data)]
        for sequence in [s for s, root in self.family.items() if root == family]:
            self._free(sequence)

    @rule(policy=st.sampled_from(EVICTION_POLICIES.names))
    def switch(self, policy):
        self.cache.set_eviction_policy(policy)

    @invariant()
    def laws(self):
        if not hasattr(self, "cache"):
            return
        check_cache(self.cache)
        assert {waiter.sequence_id for waiter in self.cache.expecting()} == set(self.waiting)
        for sequence, tokens in self.tokens.items():
            blocks = self.cache.tables[sequence].block_ids
            for position in range(len(tokens)):
                index, slot = divmod(position, self.size)
                assert self.memory[blocks[index], slot] == tuple(tokens[: position + 1])

    def teardown(self):
        if hasattr(self, "cache"):
            for sequence in list(self.tokens):
                self._free(sequence)
            assert self.cache.usage().num_used == 0
            assert self.cache.reset()
            check_cache(self.cache)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
