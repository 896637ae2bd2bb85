"""From a request's body to what the engine takes: prompts as token ids, sampling parameters."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeVar

from octavo.core.errors import InvalidRequestError
from octavo.core.ids import TokenId
from octavo.core.structured import StructuredOutput
from octavo.engine.outputs import ModelInfo
from octavo.server.conversation import ChatNames, Conversations, RenderedChat
from octavo.server.job import Job, PreparedPrompt
from octavo.server.ports import Tokenizer
from octavo.server.prompts import PromptReader
from octavo.server.protocol.chat import ChatRequest
from octavo.server.protocol.common import GenerationRequest
from octavo.server.protocol.completions import CompletionRequest
from octavo.server.sampling import sampling_of
from octavo.server.tools.constraint import forced_calls, free_calls
from octavo.server.tools.output import PLAIN, OutputFormat
from octavo.server.tools.reasoning import CLOSE, OPEN
from octavo.server.tools.styles import ToolStyle

MAX_CHOICES: Final = 2048
"""Most completions in one answer: prompts times n."""


class Translator:
    """Translates bodies for one model. Has no state; safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: ModelInfo,
        served_names: Sequence[str],
        tool_style: ToolStyle | None = None,
    ) -> None:
        self._conversations = Conversations(tokenizer.chat_template, tool_style)
        self.prompts = PromptReader(tokenizer, info, served_names)
        self._tokenizer = tokenizer
        self._vocab_size = info.vocab_size

    def completion(self, body: bytes) -> Job[CompletionRequest]:
        """Translate the body of ``POST /v1/completions``.

        Raises:
            RequestError: it is malformed, or asks for what cannot be done.
        """
        request = CompletionRequest.parse(body)
        model = self.prompts.served_name(request.model)
        self._check_common(request)
        _check_best_of(request)
        name, branches = (
            ("n", request.n) if request.best_of is None else ("best_of", request.best_of)
        )
        if len(request.prompt) * branches > MAX_CHOICES:
            raise InvalidRequestError(
                f"{len(request.prompt)} prompts times {name} ({branches}) must not exceed "
                f"{MAX_CHOICES} completions.",
                param=name,
            )
        asked = request.max_tokens if "max_tokens" in request.model_fields_set else None
        prompts = []
        for index, prompt in enumerate(request.prompt):
            where = f"prompt[{index}]" if len(request.prompt) > 1 else "prompt"
            whole = self.prompts.token_ids(
                prompt, where, add_special=request.add_special_tokens, param="prompt"
            )
            ids = self.prompts.truncated(whole, request.truncate_prompt_tokens, request.max_tokens)
            self.prompts.check_room(ids, asked, prompt_param="prompt", tokens_param="max_tokens")
            sampling = sampling_of(
                request,
                self._vocab_size,
                max_tokens=self.prompts.cut_default(request.max_tokens, ids)
                if asked is None
                else asked,
                logprobs=request.logprobs,
                prompt_logprobs=_scored(request),
                best_of=request.best_of,
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
        model = self.prompts.served_name(request.model)
        self._check_common(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        asked = _asked_tokens(request)
        chat, ids = self.prompt_of(request, names)
        ids = self.prompts.truncated(ids, request.truncate_prompt_tokens, asked or 1)
        if not ids:
            raise InvalidRequestError(
                f"{names.messages} make an empty prompt.", param=names.messages
            )
        self.prompts.check_room(
            ids, asked, prompt_param=names.messages, tokens_param=names.max_tokens
        )
        sampling = sampling_of(
            request,
            self._vocab_size,
            max_tokens=asked,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
        )
        form = sampling.structured_output
        if form is not None and request.structured_outputs is None:
            form = replace(form, param=names.form)
        constraint = self._tool_constraint(chat, form)
        output = chat.output
        if form is not None or chat.must_call:
            # What is constrained from its first token on has no room for reasoning.
            output = replace(output, reasoning=False, in_reasoning=False)
        sampling = replace(
            sampling,
            structured_output=constraint,
            skip_special_tokens=sampling.skip_special_tokens and not self._control_marks(output),
        )
        prompt = PreparedPrompt(tuple(ids), chat.text, sampling)
        return _job(request, model, [prompt], output)

    def _tool_constraint(
        self, chat: RenderedChat, asked: StructuredOutput | None
    ) -> StructuredOutput | None:
        """Return what the answer's shape must be, so that calls are as the request wants them."""
        style = chat.output.calls
        if style is None:
            return asked
        if asked is not None and chat.must_call:
            raise InvalidRequestError(
                f"{asked.param} and a tool_choice that demands a call exclude each other.",
                param=asked.param,
            )
        marks = self._control_marks(chat.output)
        mark, single = marks.get(style.mark, style.mark), chat.output.single_call
        if chat.must_call:
            return forced_calls(style, chat.tools, single=single, mark=mark)
        is_strict = any(tool.function.strict for tool in chat.tools)
        if asked is not None or not (is_strict or chat.is_restricted):
            return asked
        thought = (OPEN, CLOSE)[chat.output.in_reasoning :]
        thought_ids = tuple(marks[name] for name in thought) if marks.keys() >= set(thought) else ()
        return free_calls(style, chat.tools, single=single, mark=mark, thought=thought_ids)

    def prompt_of(
        self, request: ChatRequest, names: ChatNames
    ) -> tuple[RenderedChat, list[TokenId]]:
        """Return a conversation's text and its token ids.

        Raises:
            RequestError: the model has no template, or the messages do not suit it.
        """
        chat = self._conversations.render(request, names)
        ids = self._tokenizer.encode(chat.text, add_special_tokens=request.add_special_tokens)
        return chat, ids

    def _control_marks(self, output: OutputFormat) -> dict[str, TokenId]:
        """Return what is looked for in the answer that is written in control tokens."""
        marks = [output.calls.mark] if output.calls is not None else []
        marks += [OPEN, CLOSE] if output.reasoning else []
        control = self._tokenizer.special_token_ids
        found = {mark: self._tokenizer.encode(mark, add_special_tokens=False) for mark in marks}
        return {mark: ids[0] for mark, ids in found.items() if len(ids) == 1 and ids[0] in control}

    def _check_common(self, request: GenerationRequest) -> None:
        if request.stream_options is not None and not request.stream:
            raise InvalidRequestError("stream_options needs stream: true.", param="stream_options")
        if request.prompt_logprobs is not None and request.stream:
            raise InvalidRequestError(
                "prompt_logprobs cannot be streamed: leave out stream.", param="prompt_logprobs"
            )
        if request.use_beam_search and request.stream:
            raise InvalidRequestError(
                "A beam search cannot be streamed: its completions come when it is done.",
                param="use_beam_search",
            )
        self.prompts.check_priority(request.priority)


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
        retention=request.kv_cache_retention.wish(),
        output=output,
    )


def _check_best_of(request: CompletionRequest) -> None:
    if request.best_of is not None and request.best_of > 1 and request.stream:
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
