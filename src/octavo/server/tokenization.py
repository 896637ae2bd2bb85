"""Text to token ids and back, without generating anything."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.ids import TokenId
from octavo.engine.outputs import ModelInfo
from octavo.server.body import read_body
from octavo.server.conversation import ChatNames
from octavo.server.errors import json_response
from octavo.server.logprobs import token_label
from octavo.server.ports import Tokenizer
from octavo.server.protocol.chat import ChatRequest
from octavo.server.protocol.tokenize import DetokenizeRequest, TokenizeChat, TokenizeText
from octavo.server.protocol.validation import load_json, validate
from octavo.server.translate import Translator


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Answers ``POST /tokenize`` and ``POST /detokenize``."""

    translator: Translator
    tokenizer: Tokenizer
    info: ModelInfo
    max_body_bytes: int

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text, or of a conversation as the model reads it."""
        return await self._answer(request, self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        return await self._answer(request, self._detokenize)

    async def _answer(self, request: Request, work: Callable[[bytes], dict[str, Any]]) -> Response:
        body = await read_body(request, self.max_body_bytes)
        return json_response(await asyncio.to_thread(work, body))

    def _tokenize(self, body: bytes) -> dict[str, Any]:
        data = load_json(body)
        asked: TokenizeChat | TokenizeText
        if "messages" in data:
            asked = validate(TokenizeChat, data)
            ids = self._conversation(data)
        else:
            asked = validate(TokenizeText, data)
            ids = self.tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)
        self.translator.prompts.served_name(asked.model)
        labels = [token_label(self.tokenizer, token_id) for token_id in ids]
        return {
            "count": len(ids),
            "max_model_len": self.info.max_model_len,
            "tokens": ids,
            "token_strs": labels if asked.return_token_strs else None,
        }

    def _conversation(self, data: Mapping[str, Any]) -> list[TokenId]:
        shared = TokenizeChat.model_fields.keys() & ChatRequest.model_fields.keys()
        chat = validate(ChatRequest, {name: data[name] for name in shared & data.keys()})
        return self.translator.prompt_of(chat, ChatNames())[1]

    def _detokenize(self, body: bytes) -> dict[str, Any]:
        asked = DetokenizeRequest.parse(body)
        self.translator.prompts.served_name(asked.model)
        self.translator.prompts.check_ids(asked.tokens, "tokens", param="tokens")
        return {"prompt": self.tokenizer.decode(asked.tokens)}
