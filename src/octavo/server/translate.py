"""From a request's body to what the engine takes: prompts as token ids, sampling parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from octavo.core.errors import ContextLengthError, InvalidRequestError, NotFoundError
from octavo.core.ids import TokenId
from octavo.core.sampling import SamplingParams
from octavo.engine.outputs import ModelInfo
from octavo.server.conversation import Conversations, RenderedChat
from octavo.server.job import Job, PreparedPrompt
from octavo.server.ports import Tokenizer
from octavo.server.protocol.chat import ChatRequest
from octavo.server.protocol.common import GenerationRequest
from octavo.server.protocol.completions import CompletionRequest, Prompt
from octavo.server.tools.output import PLAIN, OutputFormat
from octavo.server.tools.reasoning import CLOSE, OPEN
from octavo.server.tools.styles import ToolStyle

MAX_CHOICES: Final = 2048
"""Most completions in one answer: prompts times n."""


@dataclass(frozen=True, slots=True)
class ChatNames:
    """What the API that a conversation came through calls its fields, for refusals."""

    messages: str = "messages"
    max_tokens: str = "max_completion_tokens"


class Translator:
    """Translates bodies for one model. Has no state; safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: ModelInfo,
        served_names: Sequence[str],
        tool_style: ToolStyle | None = None,
    ) -> None:
        self.conversations = Conversations(tokenizer.chat_template, tool_style)
        self._tokenizer = tokenizer
        self._info = info
        self._served_names = tuple(served_names)

    def completion(self, body: bytes) -> Job[CompletionRequest]:
        """Translate the body of ``POST /v1/completions``.

        Raises:
            RequestError: it is malformed, or asks for what cannot be done.
        """
        request = CompletionRequest.parse(body)
        model = self.served_name(request.model)
        self._check_common(request)
        _check_best_of(request)
        if len(request.prompt) * request.n > MAX_CHOICES:
            raise InvalidRequestError(
                f"{len(request.prompt)} prompts times n ({request.n}) must not exceed "
                f"{MAX_CHOICES} completions.",
                param="n",
            )
        asked = request.max_tokens if "max_tokens" in request.model_fields_set else None
        prompts = []
        for index, prompt in enumerate(request.prompt):
            where = f"prompt[{index}]" if len(request.prompt) > 1 else "prompt"
            whole = self._prompt_ids(prompt, where, add_special=request.add_special_tokens)
            ids = self._truncated(whole, request.truncate_prompt_tokens, request.max_tokens)
            self._check_room(ids, asked, prompt_param="prompt", tokens_param="max_tokens")
            sampling = self._sampling(
                request,
                max_tokens=self._cut_default(request.max_tokens, ids) if asked is None else asked,
                logprobs=request.logprobs,
                prompt_logprobs=_scored(request),
            )
            if isinstance(prompt, str) and len(ids) == len(whole):
                text = prompt
            else:
                text = self._tokenizer.decode(ids)
            prompts.append(PreparedPrompt(tuple(ids), text, sampling))
        return _job(request, model, prompts)

    def chat(self, body: bytes) -> Job[ChatRequest]:
        """Translate the body of ``POST /v1/chat/completions``.

        Raises:
            RequestError: it is malformed, or asks for what cannot be done.
        """
        return self.conversation(ChatRequest.parse(body), ChatNames())

    def conversation(self, request: ChatRequest, names: ChatNames) -> Job[ChatRequest]:
        """Translate a conversation, through whatever API it came.

        Raises:
            RequestError: it asks for what cannot be done.
        """
        model = self.served_name(request.model)
        self._check_common(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        asked = _asked_tokens(request)
        chat, ids = self.prompt_of(request)
        ids = self._truncated(ids, request.truncate_prompt_tokens, asked or 1)
        if not ids:
            raise InvalidRequestError(
                f"{names.messages} make an empty prompt.", param=names.messages
            )
        self._check_room(ids, asked, prompt_param=names.messages, tokens_param=names.max_tokens)
        sampling = self._sampling(
            request,
            max_tokens=asked,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
        )
        if self._shows_control_tokens(chat.output):
            sampling = replace(sampling, skip_special_tokens=False)
        prompt = PreparedPrompt(tuple(ids), chat.text, sampling)
        return _job(request, model, [prompt], chat.output)

    def prompt_of(self, request: ChatRequest) -> tuple[RenderedChat, list[TokenId]]:
        """Return a conversation's text and its token ids.

        Raises:
            RequestError: the model has no template, or the messages do not suit it.
        """
        chat = self.conversations.render(request)
        ids = self._tokenizer.encode(chat.text, add_special_tokens=request.add_special_tokens)
        return chat, ids

    def _truncated(self, ids: list[TokenId], limit: int | None, reserved: int) -> list[TokenId]:
        """Return the last ``limit`` ids: all, if None; what ``reserved`` tokens leave, if -1."""
        if limit is None:
            return ids
        return ids[-(max(1, self._info.max_model_len - reserved) if limit == -1 else limit) :]

    def _shows_control_tokens(self, output: OutputFormat) -> bool:
        """Whether what is looked for in the answer is written in control tokens."""
        marks = [output.calls.mark] if output.calls is not None else []
        marks += [OPEN, CLOSE] if output.reasoning else []
        control = self._tokenizer.special_token_ids
        return any(
            control.intersection(self._tokenizer.encode(mark, add_special_tokens=False))
            for mark in marks
        )

    def served_name(self, name: str | None) -> str:
        if name is None:
            return self._served_names[0]
        if name not in self._served_names:
            raise NotFoundError(
                f"There is no model {name[:100]!r}; this server has: "
                f"{', '.join(self._served_names)}.",
                param="model",
            )
        return name

    def _check_common(self, request: GenerationRequest) -> None:
        if request.stream_options is not None and not request.stream:
            raise InvalidRequestError("stream_options needs stream: true.", param="stream_options")
        if request.prompt_logprobs is not None and request.stream:
            raise InvalidRequestError(
                "prompt_logprobs cannot be streamed: leave out stream.", param="prompt_logprobs"
            )
        if request.priority != 0 and self._info.scheduling_policy != "priority":
            raise InvalidRequestError(
                "priority needs a server started with --scheduling-policy priority.",
                param="priority",
            )

    def _prompt_ids(self, prompt: Prompt, where: str, *, add_special: bool) -> list[TokenId]:
        if not isinstance(prompt, str):
            self._check_ids(prompt, where)
            return prompt
        ids = self._tokenizer.encode(prompt, add_special_tokens=add_special)
        return ids or [self._document_start()]

    def _check_ids(self, ids: Sequence[TokenId], where: str) -> None:
        size = self._info.vocab_size
        if min(ids) >= 0 and max(ids) < size:
            return
        index = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < size)
        raise InvalidRequestError(
            f"{where}[{index}] must be a token id between 0 and {size - 1}, not {ids[index]}.",
            param="prompt",
        )

    def _document_start(self) -> TokenId:
        """Return the token that an empty prompt stands for."""
        if self._tokenizer.bos_token_id is not None:
            return self._tokenizer.bos_token_id
        if self._tokenizer.end_token_ids:
            return min(self._tokenizer.end_token_ids)
        raise InvalidRequestError(
            "prompt is empty, and this model has no token that starts a document.",
            param="prompt",
        )

    def _check_room(
        self, ids: Sequence[TokenId], asked: int | None, *, prompt_param: str, tokens_param: str
    ) -> None:
        """Refuse a prompt, or a number of tokens after it, that the context cannot hold."""
        limit = self._info.max_model_len
        room = limit - len(ids)
        if room < (0 if asked is not None else 1):
            raise ContextLengthError(
                f"The prompt has {len(ids)} tokens, but the model's context holds {limit}, "
                "completion included: shorten the prompt.",
                param=prompt_param,
            )
        if asked is not None and asked > room:
            raise ContextLengthError(
                f"The prompt's {len(ids)} tokens and the {asked} asked for make "
                f"{len(ids) + asked}, but the model's context holds {limit}: shorten the prompt, "
                f"or set {tokens_param} to at most {room}.",
                param=tokens_param,
            )

    def _cut_default(self, default: int, ids: Sequence[TokenId]) -> int:
        """Cut a default to what fits: nobody asked for it, so it is no reason to refuse.

        The last token needs no KV. What does not even fit alone is for the engine to refuse.
        """
        in_context = self._info.max_model_len - len(ids)
        in_cache = self._info.num_kv_tokens - len(ids) + 1
        return max(1, min(default, in_context, in_cache))

    def _sampling(
        self,
        request: GenerationRequest,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        return SamplingParams(
            n=request.n,
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=self._logit_bias(request.logit_bias),
            seed=request.seed,
            stop=tuple(request.stop),
            stop_token_ids=tuple(request.stop_token_ids),
            include_stop_str_in_output=request.include_stop_str_in_output,
            ignore_eos=request.ignore_eos,
            skip_special_tokens=request.skip_special_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _logit_bias(self, biases: Mapping[str, float]) -> dict[TokenId, float]:
        size = self._info.vocab_size
        checked = {}
        for key, bias in biases.items():
            is_number = key.isascii() and key.isdigit() and len(key) <= 20
            if not is_number or int(key) >= size:
                raise InvalidRequestError(
                    f"logit_bias has the key {key[:40]!r}; keys are token ids from 0 to "
                    f"{size - 1}.",
                    param="logit_bias",
                )
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequestError(
                    f"logit_bias of token {key} must be between -100 and 100, not {bias:g}.",
                    param="logit_bias",
                )
            checked[int(key)] = bias
        return checked


Generation = TypeVar("Generation", bound=GenerationRequest)


def _job(
    request: Generation,
    model: str,
    prompts: Sequence[PreparedPrompt],
    output: OutputFormat = PLAIN,
) -> Job[Generation]:
    return Job(
        request,
        model,
        tuple(prompts),
        n=request.n,
        stream=request.stream,
        priority=request.priority,
        cache_salt=request.cache_salt or "",
        output=output,
    )


def _check_best_of(request: CompletionRequest) -> None:
    if request.best_of is None:
        return
    if request.best_of != request.n:
        raise InvalidRequestError(
            f"best_of must equal n ({request.n}) or be left out: candidates are not ranked.",
            param="best_of",
        )
    if request.best_of > 1 and request.stream:
        raise InvalidRequestError("best_of cannot be streamed.", param="best_of")


def _scored(request: CompletionRequest) -> int | None:
    """Return how many logprobs of each prompt token the engine must report, if any."""
    echoed = request.logprobs if request.echo else None
    asked = [count for count in (echoed, request.prompt_logprobs) if count is not None]
    return max(asked, default=None)


def _asked_tokens(request: ChatRequest) -> int | None:
    asked = {request.max_completion_tokens, request.max_tokens} - {None}
    if len(asked) > 1:
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens differ: send one of them.", param="max_tokens"
        )
    return asked.pop() if asked else None
