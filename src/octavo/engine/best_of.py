"""The best of several completions: collected in silence, ranked when the last one ends."""

from dataclasses import replace

from octavo.core.request import FinishReason
from octavo.core.sampling import SamplingParams
from octavo.engine.outputs import GenerationDelta


class BestOf:
    """Collects ``best_of`` completions and gives out the ``n`` with the highest sum of logprobs.

    The sum is over the tokens that the caller gets, as in vLLM; those before a stop string count.
    A completion that failed comes last. The best is numbered 0.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self._num_wanted = sampling.n
        self._num_missing = sampling.num_branches
        self._wants_logprobs = sampling.logprobs is not None
        self._deltas: dict[int, list[GenerationDelta]] = {}

    def push(self, delta: GenerationDelta) -> tuple[GenerationDelta, ...]:
        """Take in a delta; return the best completions, one delta each, if it was the last."""
        self._deltas.setdefault(delta.index, []).append(delta)
        self._num_missing -= delta.finish_reason is not None
        if self._num_missing:
            return ()
        scored = [
            delta.prompt_logprobs
            for deltas in self._deltas.values()
            for delta in deltas
            if delta.prompt_logprobs is not None
        ]
        whole = sorted(map(_join, self._deltas.values()), key=_rank)[: self._num_wanted]
        return tuple(
            replace(
                delta,
                index=index,
                logprobs=delta.logprobs if self._wants_logprobs else (),
                prompt_logprobs=scored[0] if scored and index == 0 else None,
            )
            for index, delta in enumerate(whole)
        )


def _rank(delta: GenerationDelta) -> tuple[bool, float, int]:
    total = sum(token.logprob for token in delta.logprobs)
    return delta.finish_reason is FinishReason.ERROR, -total, delta.index


def _join(deltas: list[GenerationDelta]) -> GenerationDelta:
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
    )
