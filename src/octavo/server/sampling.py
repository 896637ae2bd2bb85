"""What a generation request asks of the sampler."""

from collections.abc import Mapping

from octavo.core.errors import InvalidRequestError
from octavo.core.ids import TokenId
from octavo.core.sampling import SamplingParams
from octavo.server.protocol.common import GenerationRequest
from octavo.server.structured import structured_output


def sampling_of(
    request: GenerationRequest,
    vocab_size: int,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    best_of: int | None = None,
) -> SamplingParams:
    """Return the engine's parameters.

    Raises:
        InvalidRequestError: a value is out of range; ``param`` names it.
    """
    temperature = request.temperature
    if request.use_beam_search and "temperature" not in request.model_fields_set:
        temperature = 0.0
    allowed = request.allowed_token_ids
    return SamplingParams(
        n=request.n,
        best_of=best_of,
        use_beam_search=request.use_beam_search,
        length_penalty=request.length_penalty,
        early_stopping=request.early_stopping,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=_logit_bias(request.logit_bias, vocab_size),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=tuple(request.bad_words),
        seed=request.seed,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        skip_special_tokens=request.skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_output=structured_output(request),
    )


def _logit_bias(biases: Mapping[str, float], size: int) -> dict[TokenId, float]:
    checked = {}
    for key, bias in biases.items():
        is_number = key.isascii() and key.isdigit() and len(key) <= 20
        if not is_number or int(key) >= size:
            raise InvalidRequestError(
                f"logit_bias has the key {key[:40]!r}; keys are token ids from 0 to {size - 1}.",
                param="logit_bias",
            )
        if not -100.0 <= bias <= 100.0:
            raise InvalidRequestError(
                f"logit_bias of token {key} must be between -100 and 100, not {bias:g}.",
                param="logit_bias",
            )
        checked[int(key)] = bias
    return checked
