"""From a prompt and what is asked of it to the engine's request."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octavo.core.clock import Clock
from octavo.core.ids import RequestId, TokenId
from octavo.core.request import CacheIdentity, Request
from octavo.core.sampling import MAX_SEED, SamplingParams


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Makes requests, and refuses what can never run."""

    identity: CacheIdentity
    check: Callable[[Request], object]
    """Raises RequestError; depends on settings only, so any thread may call it."""
    clock: Clock
    chance: random.Random

    def build(
        self,
        prompt_token_ids: Sequence[TokenId],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Return the request, with a drawn seed if none is asked for.

        Completion i samples with the seed plus i, so it is what a request of its own would give.

        Raises:
            RequestError: the prompt or a parameter is wrong, or it can never fit.
        """
        seed = self.chance.getrandbits(64) if sampling.seed is None else sampling.seed
        request = Request(
            request_id=RequestId(request_id),
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=replace(sampling, seed=seed % MAX_SEED),
            identity=replace(self.identity, salt=cache_salt),
            arrival_time=self.clock(),
            priority=priority,
        )
        self.check(request)
        return request
