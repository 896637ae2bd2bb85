"""What tests of the server share: a scripted engine, a client without sockets, a live server."""

import asyncio
import codecs
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
from fastapi import FastAPI

from octavo.core.errors import GenerationError, InvalidRequestError
from octavo.core.events import CacheUsage, EvictionTotals, SchedulerStats
from octavo.core.request import DEFAULT_RETENTION, FinishReason, Retention, TokenLogprobs
from octavo.core.sampling import SamplingParams
from octavo.engine.outputs import GenerationDelta, ModelInfo
from octavo.server.app import build_app
from octavo.server.lifecycle import Lifecycle
from octavo.server.listener import DrainingServer, listen
from support import PATIENCE_S

BOS, END = 256, 257
VOCAB_SIZE = 300
NAME = "tiny"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]

INFO = ModelInfo(
    served_name=NAME,
    backend="scripted",
    dtype="float32",
    precision="float32",
    max_model_len=256,
    vocab_size=VOCAB_SIZE,
    num_blocks=64,
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    scheduling_policy="fcfs",
    enable_prefix_caching=True,
)


class ByteTemplate:
    """Writes each message as ``<role>content|``, and tools and calls as JSON."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        text = "" if tools is None else f"{orjson.dumps(tools).decode()}|"
        for message in messages:
            calls = message.get("tool_calls")
            written = "" if calls is None else orjson.dumps(calls).decode()
            text += f"<{message['role']}>{message['content']}{written}|"
        text += "".join(f"[{name}={value}]" for name, value in variables.items())
        return text + ("<assistant>" if add_generation_prompt else "")


class ByteTokenizer:
    """One token a byte, and two control tokens."""

    def __init__(self, *, bos: int | None = None, ends: frozenset[int] = frozenset({END})) -> None:
        self.bos_token_id = bos
        self.end_token_ids = ends
        self.special_token_ids = frozenset({BOS, END})
        self.chat_template = ByteTemplate()

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else f"<{token_id}>".encode()


Answer = Callable[[Sequence[int], SamplingParams, int], bytes]


def echo_answer(prompt: Sequence[int], sampling: SamplingParams, index: int) -> bytes:
    """Answer with the choice's index and the end of the prompt, so that mix-ups show."""
    return f"{index}:".encode() + bytes(i for i in prompt if i < 256)[-8:]


@dataclass
class ScriptedEngine:
    """An engine whose answers are bytes given beforehand; each token is one byte.

    After ``hold_after`` tokens it waits for ``resume``; ``failure`` is raised (or, as a message,
    becomes the choice's error) after ``fail_after`` tokens; ``refusal`` is raised at once.
    """

    answer: Answer = echo_answer
    info: ModelInfo = INFO
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    refusal: Exception | None = None
    failure: Exception | str | None = None
    fail_after: int = 2
    hold_after: int | None = None
    num_cached: int = 0
    embedding: tuple[float, ...] | None = None
    is_running: bool = True
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[dict[str, Any]] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)

    policies: list[str] = field(default_factory=lambda: ["lru"])

    def start(self) -> None:
        self.is_running = True

    def stats(self) -> SchedulerStats:
        totals = tuple(
            EvictionTotals(name, name == self.policies[-1], 0, 0, 0, 0, 0, 0)
            for name in dict.fromkeys(self.policies)
        )
        return SchedulerStats(0, 0, CacheUsage(64, 64, 0, 0), 0, 0, 0, 0, 0, 0, totals)

    async def set_eviction_policy(self, name: str) -> None:
        if name not in ("lru", "predict"):
            raise InvalidRequestError("policy must be lru or predict.", param="policy")
        self.policies.append(name)

    def shutdown(self) -> None:
        self.is_running = False

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        retention: Retention = DEFAULT_RETENTION,
    ) -> AsyncGenerator[GenerationDelta, None]:
        if self.refusal is not None:
            raise self.refusal
        assert request_id not in self.live
        call = {"id": request_id, "prompt": list(prompt_token_ids), "sampling": sampling}
        self.calls.append(
            {**call, "priority": priority, "cache_salt": cache_salt, "retention": retention}
        )
        self.live.add(request_id)
        finished = False
        try:
            answers = [
                self._deltas(prompt_token_ids, sampling, index) for index in range(sampling.n)
            ]
            while answers:
                for deltas in list(answers):
                    delta = next(deltas)
                    if self.hold_after is not None and delta.num_generated_tokens > self.hold_after:
                        await self.resume.wait()
                    await asyncio.sleep(0)
                    if delta.finish_reason is not None:
                        answers.remove(deltas)
                    finished = not answers
                    yield delta
        finally:
            if not finished:
                self.aborted.append(request_id)
            self.live.discard(request_id)  # last: other threads wait for it

    def _deltas(
        self, prompt: Sequence[int], sampling: SamplingParams, index: int
    ) -> Iterator[GenerationDelta]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        limit = sampling.max_tokens
        limit = self.info.max_model_len - len(prompt) if limit is None else limit
        tokens = [*self.answer(prompt, sampling, index), END][:limit]
        scores = self._score_prompt(prompt, sampling) if index == 0 else None
        if not tokens:
            yield self._delta(index, prompt, "", (), (), 0, scores, FinishReason.LENGTH)
        for count, token in enumerate(tokens, start=1):
            if self.failure is not None and count > self.fail_after:
                if isinstance(self.failure, Exception):
                    raise self.failure
                yield self._delta(index, prompt, "", (), (), count, None, FinishReason.ERROR)
                return
            last = count == len(tokens)
            text = decoder.decode(b"" if token == END else bytes([token]), final=last)
            reason = FinishReason.STOP if token == END else FinishReason.LENGTH if last else None
            logprobs = () if sampling.logprobs is None else (score(token, sampling.logprobs),)
            yield self._delta(index, prompt, text, (token,), logprobs, count, scores, reason)
            scores = None

    def _delta(
        self,
        index: int,
        prompt: Sequence[int],
        text: str,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        count: int,
        scores: tuple[TokenLogprobs | None, ...] | None,
        reason: FinishReason | None,
    ) -> GenerationDelta:
        return GenerationDelta(
            index=index,
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=scores,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=self.num_cached,
            num_generated_tokens=count,
            finish_reason=reason,
            error=GenerationError(str(self.failure)) if reason is FinishReason.ERROR else None,
            embedding=self.embedding,
        )

    def _score_prompt(
        self, prompt: Sequence[int], sampling: SamplingParams
    ) -> tuple[TokenLogprobs | None, ...] | None:
        if sampling.prompt_logprobs is None:
            return None
        return (None, *(score(token, sampling.prompt_logprobs) for token in prompt[1:]))


def score(token: int, num_top: int) -> TokenLogprobs:
    """Score a token so that the likeliest is another one and the next has no probability."""
    top = ((ord("A"), -0.25), (ord("B"), float("-inf")))[:num_top]
    return TokenLogprobs(token_id=token, logprob=-1.5, rank=2, top=top)


def make_app(engine: Any, **settings: Any) -> FastAPI:
    """Build the application around an engine."""
    settings.setdefault("served_model_names", [NAME, "alias"])
    return build_app(engine, metrics=lambda: b"# no series\n", **settings)


@contextlib.asynccontextmanager
async def client_of(engine: Any, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client that speaks to the application without sockets."""
    transport = httpx.ASGITransport(app=make_app(engine, **settings), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def post(engine: Any, path: str, body: Any, **settings: Any) -> httpx.Response:
    """Send one body to an application of its own."""
    async with client_of(engine, **settings) as client:
        if isinstance(body, bytes):
            return await client.post(
                path, content=body, headers={"Content-Type": "application/json"}
            )
        return await client.post(path, json=body)


def check_error(response: httpx.Response, status: int, param: str | None = None) -> str:
    """Assert that a response is OpenAI's error body, and return the message."""
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 16_000
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    if param is not None:
        assert body["error"]["param"] == param, body
    message: str = body["error"]["message"]
    assert message
    assert "Traceback" not in message
    return message


def parse_events(data: bytes) -> list[dict[str, Any]]:
    """Read a complete stream: its framing is checked, [DONE] comes last and only once."""
    frames = data.decode().split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    bodies = [frame.removeprefix("data: ") for frame in frames]
    assert bodies.count("[DONE]") == 1
    assert bodies.pop() == "[DONE]"
    return [orjson.loads(body) for body in bodies]


def texts_of(chunks: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Join the text of each choice of a stream, of either kind."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


def reasons_of(chunks: Sequence[Mapping[str, Any]]) -> dict[int, list[str]]:
    """Collect the finish reasons of each choice, which must be in its last chunk."""
    reasons: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert choice["index"] not in reasons, "a choice went on after its finish_reason"
            if choice["finish_reason"] is not None:
                reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    return reasons


@dataclass
class LiveServer:
    """A server on a loopback port, on a thread of its own."""

    url: str
    server: DrainingServer
    lifecycle: Lifecycle
    loop: asyncio.AbstractEventLoop

    def call(self, function: Callable[[], Any]) -> None:
        """Run a function on the server's loop."""
        self.loop.call_soon_threadsafe(function)


@contextlib.contextmanager
def live_server(
    make_engine: Callable[[], Any], *, shutdown_timeout_s: float = PATIENCE_S, **settings: Any
) -> Iterator[LiveServer]:
    """Serve an engine, made on the server's loop, until the block ends."""
    ready = threading.Event()
    found: list[LiveServer] = []
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]

    async def run() -> None:
        lifecycle = Lifecycle()
        app = make_app(make_engine(), lifecycle=lifecycle, **settings)
        server = DrainingServer(
            app, lifecycle, shutdown_timeout_s=shutdown_timeout_s, on_started=ready.set
        )
        url = f"http://127.0.0.1:{port}"
        found.append(LiveServer(url, server, lifecycle, asyncio.get_running_loop()))
        await server.serve([sock])

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield found[0]
    finally:
        if found and thread.is_alive():
            found[0].call(found[0].server.stop)
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive()
