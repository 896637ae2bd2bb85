"""When an output ends by its tokens. (Stop strings are the front end's: ``Scheduler.finish``.)"""

from octavo.core.ids import TokenId
from octavo.core.request import FinishReason
from octavo.core.sampling import SamplingParams
from octavo.scheduler.sequence import Sequence


def ending_token_ids(
    sampling: SamplingParams, end_token_ids: frozenset[TokenId]
) -> frozenset[TokenId]:
    """Return the stop ids, and the model's end-of-turn ids unless they are to be ignored."""
    stop_ids = frozenset(sampling.stop_token_ids)
    return stop_ids if sampling.ignore_eos else stop_ids | end_token_ids


def finish_reason(sequence: Sequence) -> FinishReason | None:
    """Return why the output ends with its last token, or None if it goes on.

    The first ``min_tokens`` output tokens, counted without the prompt, end nothing. The end of
    the context needs no rule of its own: ``max_tokens`` was resolved so that it comes first.
    """
    num_output = len(sequence.token_ids) - sequence.num_prompt_tokens
    if (
        sequence.token_ids[-1] in sequence.ending_token_ids
        and num_output > sequence.sampling.min_tokens
    ):
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output >= sequence.max_tokens else None
