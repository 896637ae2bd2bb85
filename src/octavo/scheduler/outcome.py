"""What a step brought, gathered while the scheduler takes in the runner's output."""

from dataclasses import dataclass

from octavo.core.errors import InvariantError, RequestError
from octavo.core.ids import TokenId
from octavo.core.plan import ModelRunnerOutput, ScheduledSequence
from octavo.core.request import FinishReason, RequestStats, SequenceOutput, TokenLogprobs
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.stop import finish_reason


@dataclass(slots=True)
class StepUpdate:
    """What a step brought its requests; beam searches come last. Nobody changes it."""

    outputs: tuple[SequenceOutput, ...] = ()
    """For each request that got tokens or ended; others have none."""
    finished: tuple[RequestStats, ...] = ()
    """For each output with a finish reason."""
    first_token_latencies_s: tuple[float, ...] = ()
    """Arrival to first token, of requests that got their first."""
    inter_token_latencies_s: tuple[float, ...] = ()
    """Gap before each other token; 0 between tokens of one step."""
    num_prompt_tokens: int = 0
    """Prompt tokens computed, recompute after preemption included."""
    num_generation_tokens: int = 0
    """Tokens generated."""


class StepOutcome:
    """Collects a StepUpdate; made for the step, thrown away with it."""

    __slots__ = ("_finished", "_first", "_gaps", "_now", "_num_prompt", "_outputs")

    def __init__(self, now: float) -> None:
        self._now = now
        self._outputs: list[SequenceOutput] = []
        self._finished: list[RequestStats] = []
        self._first: list[float] = []
        self._gaps: list[float] = []
        self._num_prompt = 0

    def count_prefilled(self, sequence: Sequence, item: ScheduledSequence) -> None:
        """Count the computed tokens that belong to a prefill, which some do, not to a decode."""
        end = min(item.start + len(item.token_ids), sequence.prefill_end)
        self._num_prompt += end - item.start

    def add_tokens(self, sequence: Sequence, result: ModelRunnerOutput) -> FinishReason | None:
        """Append the sampled tokens up to the one that ends the output, and emit them.

        Returns:
            Why the output ends, or None if it goes on.

        Raises:
            InvariantError: the runner sampled nothing, or left out logprobs that were asked for.
        """
        sampled = result.sampled.get(sequence.sequence_id, ())
        if not sampled:
            raise InvariantError("the runner sampled nothing", story=sequence.tell())
        reason = None
        num_new = 0
        for token_id in sampled:
            sequence.token_ids.append(token_id)
            num_new += 1
            self._time_token(sequence)
            reason = finish_reason(sequence)
            if reason is not None:
                break
        if sequence.sequence_id in result.completed and num_new == len(sampled):
            reason = FinishReason.STOP
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sequence.sampling.logprobs is not None:
            logprobs = result.logprobs.get(sequence.sequence_id, ())[:num_new]
            if len(logprobs) != num_new:
                raise InvariantError("the runner left out logprobs", story=sequence.tell())
        self._emit(sequence, sampled[:num_new], logprobs, reason)
        return reason

    def add_prompt(self, sequence: Sequence, result: ModelRunnerOutput) -> FinishReason:
        """Emit the end of a request that only scores or embeds its prompt (``max_tokens`` 0).

        Raises:
            InvariantError: the runner left out the embedding that was asked for.
        """
        embedding = None
        if sequence.sampling.pooling is not None:
            embedding = result.pooled.get(sequence.sequence_id)
            if embedding is None:
                raise InvariantError("the runner left out the embedding", story=sequence.tell())
        self._emit(sequence, (), (), FinishReason.LENGTH, embedding)
        return FinishReason.LENGTH

    def add_found(
        self, sequence: Sequence, tokens: tuple[TokenLogprobs, ...], reason: FinishReason
    ) -> None:
        """Emit a completion that a beam search found, all at once."""
        for token in tokens:
            sequence.token_ids.append(token.token_id)
            self._time_token(sequence)
        token_ids = tuple(token.token_id for token in tokens)
        asked = sequence.sampling.logprobs is not None
        self._emit(sequence, token_ids, tokens if asked else (), reason)

    def add_error(self, sequence: Sequence, error: RequestError) -> None:
        """Emit the end of a request that failed."""
        output = SequenceOutput(
            sequence.request_id,
            num_cached_tokens=sequence.num_cached_tokens,
            finish_reason=FinishReason.ERROR,
            error=error,
            index=sequence.index,
        )
        self._outputs.append(output)

    def add_finished(self, stats: RequestStats) -> None:
        """Keep the life of a request that ended."""
        self._finished.append(stats)

    def build(self) -> StepUpdate:
        """Freeze what was collected."""
        return StepUpdate(
            outputs=tuple(self._outputs),
            finished=tuple(self._finished),
            first_token_latencies_s=tuple(self._first),
            inter_token_latencies_s=tuple(self._gaps),
            num_prompt_tokens=self._num_prompt,
            num_generation_tokens=len(self._first) + len(self._gaps),
        )

    def _time_token(self, sequence: Sequence) -> None:
        last = sequence.last_token_time
        if last is None:
            sequence.first_token_time = self._now
            self._first.append(self._now - sequence.arrival_time)
        else:
            self._gaps.append(self._now - last)
        sequence.last_token_time = self._now

    def _emit(
        self,
        sequence: Sequence,
        token_ids: tuple[TokenId, ...],
        logprobs: tuple[TokenLogprobs, ...],
        reason: FinishReason | None,
        embedding: tuple[float, ...] | None = None,
    ) -> None:
        output = SequenceOutput(
            sequence.request_id,
            token_ids,
            logprobs,
            sequence.take_prompt_logprobs() if sequence.wants_prompt_logprobs else None,
            sequence.num_cached_tokens,
            reason,
            _stop_token(sequence) if reason is FinishReason.STOP else None,
            None,
            embedding,
            sequence.index,
        )
        self._outputs.append(output)


def _stop_token(sequence: Sequence) -> TokenId | None:
    """Return the last token if the output stops with it; a grammar may stop with any other."""
    last = sequence.token_ids[-1]
    return last if last in sequence.ending_token_ids else None
