"""From a request's body to what the engine takes: prompts as token ids, sampling parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from octavo.core.errors import ContextLengthError, InvalidRequestError, NotFoundError
from octavo.core.ids import TokenId
from octavo.core.sampling import SamplingParams
from octavo.engine.outputs import ModelInfo
from octavo.server.ports import Tokenizer
from octavo.server.protocol.chat import ChatRequest, Content, Message, ToolMessage
from octavo.server.protocol.common import GenerationRequest
from octavo.server.protocol.completions import CompletionRequest, Prompt

OWN_FIELDS: Final = frozenset({"messages", "tools", "add_generation_prompt"})
"""Template variables that have fields of their own in the body."""
Body = TypeVar("Body", bound=GenerationRequest, covariant=True)


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt, ready for the engine."""

    token_ids: tuple[TokenId, ...]
    text: str
    """As the client wrote it, or the text of its token ids."""
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Job(Generic[Body]):
    """A request, ready for the engine."""

    request: Body
    model: str
    """The served name that the client used."""
    prompts: tuple[PreparedPrompt, ...]

    @property
    def num_choices(self) -> int:
        """Completions of all prompts together."""
        return len(self.prompts) * self.request.n


class Translator:
    """Translates bodies for one model. Has no state; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo, served_names: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._served_names = tuple(served_names)

    def completion(self, body: bytes) -> Job[CompletionRequest]:
        """Translate the body of ``POST /v1/completions``.

        Raises:
            RequestError: it is malformed, or asks for what cannot be done.
        """
        request = CompletionRequest.parse(body)
        model = self._served_name(request.model)
        self._check_common(request)
        _check_best_of(request)
        # A default that nobody asked for must not be the reason for a refusal, so it is cut to
        # fit; a number that was asked for is not.
        asked = request.max_tokens if "max_tokens" in request.model_fields_set else None
        prompts = []
        for index, prompt in enumerate(request.prompt):
            ids = self._prompt_ids(prompt, f"prompt[{index}]" if len(request.prompt) > 1 else "")
            room = self._room(ids, asked, prompt_param="prompt", tokens_param="max_tokens")
            sampling = self._sampling(
                request,
                max_tokens=min(request.max_tokens, room) if asked is None else asked,
                logprobs=request.logprobs,
                prompt_logprobs=_scored(request),
            )
            text = prompt if isinstance(prompt, str) else self._tokenizer.decode(ids)
            prompts.append(PreparedPrompt(tuple(ids), text, sampling))
        return Job(request, model, tuple(prompts))

    def chat(self, body: bytes) -> Job[ChatRequest]:
        """Translate the body of ``POST /v1/chat/completions``.

        Raises:
            RequestError: it is malformed, or asks for what cannot be done.
        """
        request = ChatRequest.parse(body)
        model = self._served_name(request.model)
        self._check_common(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        asked = _asked_tokens(request)
        text = self._render(request)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            raise InvalidRequestError("messages make an empty prompt.", param="messages")
        self._room(ids, asked, prompt_param="messages", tokens_param="max_completion_tokens")
        sampling = self._sampling(
            request,
            max_tokens=asked,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
        )
        return Job(request, model, (PreparedPrompt(tuple(ids), text, sampling),))

    def _served_name(self, name: str | None) -> str:
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

    def _prompt_ids(self, prompt: Prompt, where: str) -> list[TokenId]:
        if not isinstance(prompt, str):
            self._check_ids(prompt, where or "prompt")
            return prompt
        ids = self._tokenizer.encode(prompt)
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

    def _room(
        self, ids: Sequence[TokenId], asked: int | None, *, prompt_param: str, tokens_param: str
    ) -> int:
        """Return how many tokens may follow the prompt, or refuse what does not fit."""
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
        return room

    def _render(self, request: ChatRequest) -> str:
        template = self._tokenizer.chat_template
        if template is None:
            raise InvalidRequestError(
                "This model has no chat template: use /v1/completions.", param="messages"
            )
        taken = OWN_FIELDS & request.chat_template_kwargs.keys()
        if taken:
            raise InvalidRequestError(
                f"chat_template_kwargs must not hold {min(taken)}.", param="chat_template_kwargs"
            )
        messages = [_as_mapping(message) for message in request.messages]
        if not request.continue_final_message:
            opens = request.add_generation_prompt is not False
            return template.render(
                messages, add_generation_prompt=opens, **request.chat_template_kwargs
            )
        if request.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        text = template.render(
            messages, add_generation_prompt=False, **request.chat_template_kwargs
        )
        return _up_to_last(request.messages[-1], text)

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


def _as_mapping(message: Message) -> dict[str, object]:
    """Return a message as chat templates know it; they call a developer ``system``."""
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, object] = {"role": role, "content": _plain(message.content)}
    if isinstance(message, ToolMessage):
        fields["tool_call_id"] = message.tool_call_id
    elif message.name is not None:
        fields["name"] = message.name
    return fields


def _plain(content: Content) -> str | list[dict[str, str]]:
    """Return content as plain values; the template joins parts where it takes only text."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def _up_to_last(message: Message, text: str) -> str:
    """Cut a rendered conversation after its last message's content, so that it goes on there."""
    content = message.content if isinstance(message.content, str) else message.content[-1].text
    content = content.strip()
    end = text.rfind(content)
    if message.role != "assistant" or not content or end < 0:
        raise InvalidRequestError(
            "continue_final_message needs a last message of the assistant, with text that the "
            "chat template keeps.",
            param="continue_final_message",
        )
    return text[: end + len(content)]
