"""From bodies of ``POST /v1/embeddings`` to what the engine takes."""

from octavo.core.sampling import SamplingParams
from octavo.server.job import Job, PreparedPrompt
from octavo.server.prompts import PromptReader
from octavo.server.protocol.embeddings import EmbeddingRequest


class EmbeddingTranslator:
    """Translates bodies for one model. Has no state; safe to use from several threads."""

    def __init__(self, prompts: PromptReader) -> None:
        self._prompts = prompts

    def embedding(self, body: bytes) -> Job[EmbeddingRequest]:
        """Translate a body.

        Raises:
            RequestError: it is malformed, or asks for what cannot be done.
        """
        request = EmbeddingRequest.parse(body)
        model = self._prompts.served_name(request.model)
        self._prompts.check_priority(request.priority)
        sampling = SamplingParams(max_tokens=0, pooling=request.pooling)
        prompts = []
        for index, prompt in enumerate(request.input):
            where = f"input[{index}]" if len(request.input) > 1 else "input"
            ids = self._prompts.token_ids(
                prompt, where, add_special=request.add_special_tokens, param="input"
            )
            ids = self._prompts.truncated(ids, request.truncate_prompt_tokens, 0)
            self._prompts.check_room(ids, 0, prompt_param="input", tokens_param="input")
            prompts.append(PreparedPrompt(tuple(ids), "", sampling))
        return Job(
            request,
            model,
            tuple(prompts),
            priority=request.priority,
            cache_salt=request.cache_salt or "",
        )
