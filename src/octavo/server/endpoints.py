"""What clients can ask of the model: every route that reads a body."""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI, Request
from starlette.responses import Response

from octavo import __version__
from octavo.server.anthropic.answers import MessageEvents, messages_body
from octavo.server.anthropic.counting import TokenCounter
from octavo.server.anthropic.protocol import CountRequest, MessagesRequest
from octavo.server.anthropic.translate import MessagesTranslator
from octavo.server.body import DEFAULT_MAX_BODY_BYTES
from octavo.server.chat import chat_body, chat_events
from octavo.server.completions import completion_body, completion_events
from octavo.server.embedding_translate import EmbeddingTranslator
from octavo.server.embeddings import embeddings_body
from octavo.server.eviction import EvictionControl
from octavo.server.generation import Generator
from octavo.server.handler import Endpoint, Handler
from octavo.server.lifecycle import Lifecycle
from octavo.server.openapi import json_body
from octavo.server.ports import Engine
from octavo.server.protocol.chat import ChatRequest
from octavo.server.protocol.completions import CompletionRequest
from octavo.server.protocol.embeddings import EmbeddingRequest
from octavo.server.protocol.eviction import EvictionPolicyRequest
from octavo.server.protocol.tokenize import DetokenizeRequest, TokenizeChat, TokenizeText
from octavo.server.protocol.validation import StrictModel
from octavo.server.responses_api.answers import ResponseEvents, response_body
from octavo.server.responses_api.protocol import ResponsesRequest
from octavo.server.responses_api.translate import ResponsesTranslator
from octavo.server.tokenization import Tokenization
from octavo.server.translate import Translator

ROUTES: Final[Mapping[str, tuple[type[StrictModel], ...]]] = {
    "/v1/completions": (CompletionRequest,),
    "/v1/chat/completions": (ChatRequest,),
    "/v1/responses": (ResponsesRequest,),
    "/v1/embeddings": (EmbeddingRequest,),
    "/v1/messages": (MessagesRequest,),
    "/v1/messages/count_tokens": (CountRequest,),
    "/tokenize": (TokenizeText, TokenizeChat),
    "/detokenize": (DetokenizeRequest,),
    "/kv_cache/eviction_policy": (EvictionPolicyRequest,),
}
"""Which bodies each path takes: one of these."""


def add_endpoints(
    app: FastAPI,
    engine: Engine,
    generator: Generator,
    lifecycle: Lifecycle,
    translator: Translator,
) -> None:
    """Add the routes to an application."""
    info = engine.info
    shared: dict[str, Any] = {
        "generator": generator,
        "tokenizer": engine.tokenizer,
        "lifecycle": lifecycle,
        "system_fingerprint": f"octavo-{__version__}-{info.backend}-{info.precision}-{info.dtype}",
        "max_body_bytes": DEFAULT_MAX_BODY_BYTES,
    }
    _add_openai(app, translator, shared)
    _add_anthropic(app, translator, shared)
    _add_tokenization(app, engine, translator)
    _add_eviction(app, engine)


def _body(path: str) -> dict[str, Any]:
    return json_body(*ROUTES[path])


def _add_openai(app: FastAPI, translator: Translator, shared: dict[str, Any]) -> None:
    completions = Handler(
        Endpoint("cmpl-", translator.completion, completion_body, completion_events), **shared
    )
    chat = Handler(Endpoint("chatcmpl-", translator.chat, chat_body, chat_events), **shared)
    responses = Handler(
        Endpoint("resp_", ResponsesTranslator(translator).response, response_body, ResponseEvents),
        **shared,
    )

    embeddings = Handler(
        Endpoint("embd-", EmbeddingTranslator(translator.prompts).embedding, embeddings_body),
        **shared,
    )

    @app.post("/v1/completions", openapi_extra=_body("/v1/completions"))
    async def create_completion(request: Request) -> Response:
        """Complete one or several prompts."""
        return await completions(request)

    @app.post("/v1/chat/completions", openapi_extra=_body("/v1/chat/completions"))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        return await chat(request)

    @app.post("/v1/responses", openapi_extra=_body("/v1/responses"))
    async def create_response(request: Request) -> Response:
        """Answer a conversation, as OpenAI's Responses API does; nothing is stored."""
        return await responses(request)

    @app.post("/v1/embeddings", openapi_extra=_body("/v1/embeddings"))
    async def create_embedding(request: Request) -> Response:
        """Turn texts into vectors."""
        return await embeddings(request)


def _add_anthropic(app: FastAPI, translator: Translator, shared: dict[str, Any]) -> None:
    messages_translator = MessagesTranslator(translator)
    messages = Handler(
        Endpoint("msg_", messages_translator.messages, messages_body, MessageEvents), **shared
    )
    counter = TokenCounter(messages_translator, DEFAULT_MAX_BODY_BYTES)

    @app.post("/v1/messages", openapi_extra=_body("/v1/messages"))
    async def create_message(request: Request) -> Response:
        """Answer a conversation, as Anthropic's Messages API does."""
        return await messages(request)

    @app.post("/v1/messages/count_tokens", openapi_extra=_body("/v1/messages/count_tokens"))
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a conversation, as Anthropic's Messages API does."""
        return await counter(request)


def _add_tokenization(app: FastAPI, engine: Engine, translator: Translator) -> None:
    tokenization = Tokenization(translator, engine.tokenizer, engine.info, DEFAULT_MAX_BODY_BYTES)

    @app.post("/tokenize", openapi_extra=_body("/tokenize"))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a text or of a conversation."""
        return await tokenization.tokenize(request)

    @app.post("/detokenize", openapi_extra=_body("/detokenize"))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        return await tokenization.detokenize(request)


def _add_eviction(app: FastAPI, engine: Engine) -> None:
    control = EvictionControl(engine)
    path = "/kv_cache/eviction_policy"
    app.add_api_route(path, control.show, methods=["GET"])

    @app.post(path, openapi_extra=_body(path))
    async def switch_eviction_policy(request: Request) -> Response:
        """Put another eviction policy in force; nothing cached is lost."""
        return await control.switch(request)
