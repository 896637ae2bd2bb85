"""What any endpoint asks of prompts: token ids of the vocabulary that fit the context."""

from collections.abc import Sequence

from octavo.core.errors import ContextLengthError, InvalidRequestError, NotFoundError
from octavo.core.ids import TokenId
from octavo.engine.outputs import ModelInfo
from octavo.server.ports import Tokenizer
from octavo.server.protocol.completions import Prompt


class PromptReader:
    """Reads and checks prompts for one model. Has no state; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo, served_names: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._served_names = tuple(served_names)

    def served_name(self, name: str | None) -> str:
        """Return the name of the model that is asked for; NotFoundError if there is none."""
        if name is None:
            return self._served_names[0]
        if name not in self._served_names:
            raise NotFoundError(
                f"There is no model {name[:100]!r}; this server has: "
                f"{', '.join(self._served_names)}.",
                param="model",
            )
        return name

    def check_priority(self, priority: int) -> None:
        """Refuse a priority where the queue has none."""
        if priority != 0 and self._info.scheduling_policy != "priority":
            raise InvalidRequestError(
                "priority needs a server started with --scheduling-policy priority.",
                param="priority",
            )

    def token_ids(
        self, prompt: Prompt, where: str, *, add_special: bool, param: str
    ) -> list[TokenId]:
        """Return a prompt's ids: at least one, all of the vocabulary."""
        if not isinstance(prompt, str):
            self.check_ids(prompt, where, param=param)
            return prompt
        ids = self._tokenizer.encode(prompt, add_special_tokens=add_special)
        return ids or [self._document_start()]

    def check_ids(self, ids: Sequence[TokenId], where: str, *, param: str) -> None:
        """Refuse ids outside of the vocabulary."""
        size = self._info.vocab_size
        index = next((i for i, token_id in enumerate(ids) if not 0 <= token_id < size), None)
        if index is not None:
            raise InvalidRequestError(
                f"{where}[{index}] must be a token id between 0 and {size - 1}, not {ids[index]}.",
                param=param,
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

    def check_room(
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

    def cut_default(self, default: int, ids: Sequence[TokenId]) -> int:
        """Cut a default to what fits: nobody asked for it, so it is no reason to refuse.

        The last token needs no KV. What does not even fit alone is for the engine to refuse.
        """
        in_context = self._info.max_model_len - len(ids)
        in_cache = self._info.num_kv_tokens - len(ids) + 1
        return max(1, min(default, in_context, in_cache))

    def truncated(self, ids: list[TokenId], limit: int | None, reserved: int) -> list[TokenId]:
        """Return the last ``limit`` ids: all, if None; what ``reserved`` tokens leave, if -1."""
        if limit is None:
            return ids
        return ids[-(max(1, self._info.max_model_len - reserved) if limit == -1 else limit) :]
