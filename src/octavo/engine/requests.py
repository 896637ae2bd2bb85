"""From a prompt and what is asked of it to the engine's request."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octavo.core.clock import Clock
from octavo.core.ids import RequestId, TokenId
from octavo.core.request import DEFAULT_RETENTION, CacheIdentity, Request, Retention
from octavo.core.sampling import MAX_SEED, SamplingParams


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Makes requests, and refuses what can never run."""

    identity: CacheIdentity
    check: Callable[[Request], object]
    """Raises RequestError; depends on settings only, so any thread may call it."""
    clock: Clock
    chance: random.Random
    encode: Callable[[str], Sequence[TokenId]]
    """Returns the ids of a text in the middle of others."""

    def build(
        self,
        prompt_token_ids: Sequence[TokenId],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        retention: Retention = DEFAULT_RETENTION,
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
            sampling=replace(
                sampling,
                seed=seed % MAX_SEED,
                bad_words_token_ids=sampling.bad_words_token_ids + self._spelt(sampling.bad_words),
            ),
            identity=replace(self.identity, salt=cache_salt),
            arrival_time=self.clock(),
            priority=priority,
            retention=retention,
        )
        self.check(request)
        return request

    def _spelt(self, words: Sequence[str]) -> tuple[tuple[TokenId, ...], ...]:
        """Return how words are written: at the start of a text, and after a space.

        As in vLLM, the latter counts only where it is as many tokens and begins with another one:
        else it is the former after a token for the space.
        """
        found = []
        for word in words:
            plain, spaced = (tuple(self.encode(space + word.lstrip())) for space in ("", " "))
            found.append(plain)
            if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
                found.append(spaced)
        return tuple(ids for ids in found if ids)
