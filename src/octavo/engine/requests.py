"""From a prompt and what is asked of it to the engine's requests."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octavo.core.clock import Clock
from octavo.core.ids import RequestId, TokenId
from octavo.core.request import CacheIdentity, Request
from octavo.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Makes one request per completion of a prompt, and refuses what can never run."""

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
    ) -> list[Request]:
        """Return ``sampling.n`` requests whose seeds are the asked (or a drawn) one plus 0, 1, …

        Raises:
            RequestError: the prompt or a parameter is wrong, or it can never fit.
        """
        seed = self.chance.getrandbits(64) if sampling.seed is None else sampling.seed
        prompt = tuple(prompt_token_ids)
        now = self.clock()
        requests = []
        for index in range(sampling.n):
            # Only one of the completions needs to score the prompt they share.
            scored = sampling.prompt_logprobs if index == 0 else None
            request = Request(
                request_id=RequestId(f"{request_id}-{index}" if sampling.n > 1 else request_id),
                prompt_token_ids=prompt,
                sampling=replace(
                    sampling, n=1, seed=(seed + index) % 2**64, prompt_logprobs=scored
                ),
                identity=replace(self.identity, salt=cache_salt),
                arrival_time=now,
                priority=priority,
            )
            self.check(request)
            requests.append(request)
        return requests
