"""From the scheduler's outputs to what callers get, one live completion at a time.

It runs where the front end runs, so detokenizing overlaps with the next step, which may therefore
compute a token past a stop string: such tokens are dropped here and counted nowhere but in the
running total of generated tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from octavo.core.events import Observer, RequestFinished
from octavo.core.ids import RequestId
from octavo.core.request import FinishReason, Request, RequestStats, SequenceOutput
from octavo.engine.best_of import BestOf
from octavo.engine.outputs import GenerationDelta
from octavo.engine.text_stream import TextStream
from octavo.models.tokenizer import Tokenizer


@dataclass(slots=True)
class _Completion:
    """A live completion; ``ended`` holds the reason once the caller has its last delta."""

    text: TextStream
    num_tokens: int = 0
    ended: FinishReason | None = None


class _Answer:
    """A live request: its completions until the engine has said its last word about each."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self.request = request
        self.completions = {
            index: _Completion(TextStream(tokenizer, sampling))
            for index in range(sampling.num_reported)
        }
        self.best_of = BestOf(sampling) if sampling.num_reported > sampling.n else None


@dataclass(slots=True)
class Processed:
    """What came of one engine output."""

    request_id: RequestId
    index: int
    """The completion that the output belonged to."""
    deltas: tuple[GenerationDelta, ...]
    """Usually one; with ``best_of`` none until all completions have ended, then the best."""
    stopped_after: int | None
    """Number of tokens after which a stop string ended it, which the engine must be told."""


class OutputProcessor:
    """Keeps each request until the engine's last word about it."""

    def __init__(self, tokenizer: Tokenizer, observer: Observer) -> None:
        self._tokenizer = tokenizer
        self._observer = observer
        self._live: dict[RequestId, _Answer] = {}

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request: Request) -> None:
        """Start the completions of a request."""
        self._live[request.request_id] = _Answer(request, self._tokenizer)

    def drop(self, request_id: RequestId) -> None:
        """Forget a request that the engine will say no more about."""
        self._live.pop(request_id, None)

    def process(self, outputs: Iterable[SequenceOutput]) -> list[Processed]:
        """Turn engine outputs into deltas; those past a completion's end vanish."""
        processed = []
        for output in outputs:
            answer = self._live.get(output.request_id)
            completion = None if answer is None else answer.completions.get(output.index)
            if answer is not None and completion is not None and completion.ended is None:
                processed.append(self._advance(answer, completion, output))
        return processed

    def settle(self, finished: Iterable[RequestStats]) -> list[RequestId]:
        """Take the engine's last word on completions, report them, return requests that ended."""
        settled = []
        for stats in finished:
            answer = self._live.get(stats.request_id)
            completion = None if answer is None else answer.completions.pop(stats.index, None)
            if answer is None or completion is None:
                continue
            if completion.ended is not None:
                stats = replace(
                    stats,
                    finish_reason=completion.ended,
                    num_generation_tokens=completion.num_tokens,
                )
            self._observer.on_event(RequestFinished(stats))
            if not answer.completions:
                del self._live[stats.request_id]
                settled.append(stats.request_id)
        return settled

    def _advance(
        self, answer: _Answer, completion: _Completion, output: SequenceOutput
    ) -> Processed:
        text = completion.text.push(
            output.new_token_ids,
            last=output.finish_reason is not None,
            stop_token=output.stop_token_id is not None,
        )
        completion.num_tokens += text.num_tokens
        reason = output.finish_reason if text.stop is None else FinishReason.STOP
        completion.ended = reason
        delta = GenerationDelta(
            index=output.index,
            text=text.text,
            token_ids=output.new_token_ids[: text.num_tokens],
            logprobs=output.new_logprobs[: text.num_tokens],
            prompt_logprobs=output.prompt_logprobs,
            num_prompt_tokens=len(answer.request.prompt_token_ids),
            num_cached_tokens=output.num_cached_tokens,
            num_generated_tokens=completion.num_tokens,
            finish_reason=reason,
            stop_reason=_stop_reason(answer.request, output, text.stop) if reason else None,
            error=output.error,
            embedding=output.embedding,
        )
        deltas = (delta,) if answer.best_of is None else answer.best_of.push(delta)
        told = output.finish_reason is not None or text.stop is None
        stopped_after = None if told else completion.num_tokens
        return Processed(output.request_id, output.index, deltas, stopped_after)


def _stop_reason(request: Request, output: SequenceOutput, stop: str | None) -> str | int | None:
    """Return what ended a text: a stop string or an id that was asked for, else None."""
    if stop is not None:
        return stop
    asked = request.sampling.stop_token_ids
    return output.stop_token_id if output.stop_token_id in asked else None
