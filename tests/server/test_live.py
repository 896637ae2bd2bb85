"""The server on a real port: clients that leave, OpenAI's own client, draining."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from octavo.core.errors import SetupError
from octavo.server.listener import listen
from support import PATIENCE_S
from support_server import (
    CHAT,
    COMPLETIONS,
    HELLO,
    LiveServer,
    ScriptedEngine,
    live_server,
    parse_events,
    texts_of,
)

LONG = {"messages": HELLO, "max_tokens": 200}


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread brings about."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


@pytest.fixture
def engines() -> list[ScriptedEngine]:
    """The engines that were made, on their server's loop."""
    return []


@pytest.fixture
def server(engines: list[ScriptedEngine]) -> Iterator[LiveServer]:
    """A server whose engine stops after three tokens until told to go on."""
    with live_server(lambda: engines.append(held()) or engines[0]) as live:
        yield live


def held() -> ScriptedEngine:
    return ScriptedEngine(answer=lambda prompt, sampling, index: b"x" * 50, hold_after=3)


def open_connection(url: str, path: str, body: bytes) -> socket.socket:
    """Send a request by hand, so that the connection can be dropped at any moment."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [b"false", b"true"])
@pytest.mark.parametrize(
    ("path", "rest"),
    [
        (CHAT, b'"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}'),
        (COMPLETIONS, b'"prompt": "a", "n": 3, "max_tokens": 200}'),
        (COMPLETIONS, b'"prompt": ["a", "b", "c"], "max_tokens": 200}'),
    ],
)
def test_a_client_that_leaves_ends_its_work(
    server: LiveServer, engines: list[ScriptedEngine], stream: bytes, path: str, rest: bytes
) -> None:
    """HT-09: closing the connection aborts every sequence of the request, streamed or not, five
    times in a row, and the server still answers."""
    body = b'{"stream": ' + stream + b", " + rest
    for attempt in range(1, 6):
        connection = open_connection(server.url, path, body)
        num_prompts = 3 if b'["a"' in body else 1
        until(lambda n=num_prompts: len(engines[0].live) == n)
        if stream == b"true":
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connection.close()
        until(lambda: not engines[0].live)
        assert len(engines[0].aborted) == attempt * num_prompts
        until(lambda: server.lifecycle.num_active == 0)
    server.call(engines[0].resume.set)
    answer = httpx.post(server.url + COMPLETIONS, json={"prompt": "a"}, timeout=PATIENCE_S)
    assert answer.status_code == 200


def test_a_client_that_leaves_while_sending(server: LiveServer) -> None:
    """HT-09: half a body leaves nothing behind."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        until(lambda: server.lifecycle.num_active == 1)
    until(lambda: server.lifecycle.num_active == 0)


def test_openai_client() -> None:
    """The unmodified openai client: chat, completions, models, streams and errors."""
    with (
        live_server(ScriptedEngine, api_key="k") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list()] == ["tiny", "alias"]
        chat = client.chat.completions.create(
            model="tiny", messages=HELLO, logprobs=True, top_logprobs=1, seed=1
        )
        assert chat.choices[0].message.content == "0:sistant>"
        assert chat.choices[0].logprobs.content[0].top_logprobs[0].token == "A"
        assert chat.usage.prompt_tokens_details.cached_tokens == 0
        whole = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, echo=True)
        assert [choice.text for choice in whole.choices] == ["ab0:ab", "ab1:ab", "cd0:cd", "cd1:cd"]
        stream = client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert (text, chunks[-1].usage.prompt_tokens) == ("0:sistant>", 20)
        with client.chat.completions.stream(model="tiny", messages=HELLO) as events:
            assert events.get_final_completion().choices[0].message.content == "0:sistant>"
        with pytest.raises(openai.NotFoundError, match="tiny"):
            client.chat.completions.create(model="other", messages=HELLO)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="tiny", prompt="a", temperature=3)
    with (
        live_server(lambda: ScriptedEngine(failure="It broke.", fail_after=3)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client,
    ):
        stream = client.completions.create(model="tiny", prompt="a", stream=True)
        with pytest.raises(openai.APIError, match=r"It broke\."):
            list(stream)


def test_async_openai_client() -> None:
    """The async openai client: many streams at once, each with its own text."""

    async def run(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as client:

            async def one(index: int) -> str:
                stream = await client.completions.create(
                    model="tiny", prompt=f"<{index}>", stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, range(20)))

    with live_server(ScriptedEngine) as server:
        assert asyncio.run(run(server.url)) == [f"0:<{index}>" for index in range(20)]


class Call(threading.Thread):
    """A request on a thread, and what came of it."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__()
        self.url, self.body = url, body
        self.has_begun = threading.Event()
        """Set once the status has come: for a stream, before its end."""
        self.start()

    def run(self) -> None:
        ask = httpx.stream("POST", self.url + CHAT, json=self.body, timeout=PATIENCE_S)
        with ask as self.response:
            self.has_begun.set()
            self.response.read()

    def result(self) -> httpx.Response:
        self.join(PATIENCE_S)
        return self.response


def test_draining_finishes_what_runs(server: LiveServer, engines: list[ScriptedEngine]) -> None:
    """HT-15: told to stop, the server turns unready and refuses, but answers what it has whole."""
    calls = [Call(server.url, {**LONG, "stream": stream}) for stream in (True, False)]
    until(lambda: len(engines[0].live) == 2)
    server.call(server.server.stop)
    until(lambda: server.lifecycle.is_draining)
    for path, status in (("/health", 503), ("/live", 200), ("/metrics", 200), ("/v1/models", 503)):
        assert httpx.get(server.url + path, timeout=PATIENCE_S).status_code == status
    refused = httpx.post(server.url + CHAT, json=LONG, timeout=PATIENCE_S)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    server.call(engines[0].resume.set)
    streamed, whole = (call.result() for call in calls)
    assert texts_of(parse_events(streamed.content)) == {0: "x" * 50}
    assert whole.json()["choices"][0]["message"]["content"] == "x" * 50
    until(lambda: server.server.should_exit)
    assert not engines[0].aborted


def test_draining_has_a_deadline(engines: list[ScriptedEngine]) -> None:
    """HT-15: what is longer than the timeout ends with an error that says so: as an event of a
    stream, as a 503 otherwise."""
    with live_server(
        lambda: engines.append(held()) or engines[0], shutdown_timeout_s=0.2
    ) as server:
        calls = [Call(server.url, {**LONG, "stream": stream}) for stream in (True, False)]
        until(lambda: len(engines[0].live) == 2)
        assert calls[0].has_begun.wait(PATIENCE_S)
        server.call(server.server.stop)
        streamed, whole = (call.result() for call in calls)
    last = streamed.text.split("\n\n")[-2]
    assert last.startswith('data: {"error":{"message":"The server shut down before')
    assert "[DONE]" not in streamed.text
    assert whole.status_code == 503
    assert len(engines[0].aborted) == 2


def test_port_in_use() -> None:
    """A port that is taken is one sentence before anything slow is done."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SetupError, match=r"^Port \d+ of 127.0.0.1 is in use"):
            listen("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "port", "told"),
    [
        ("192.0.2.1", 0, "Cannot listen on 192.0.2.1 port 0: "),
        ("a..b", 0, "Cannot listen on a..b port 0: "),
        ("127.0.0.1", 70000, "--port must be between 0 and 65535, not 70000"),
        ("127.0.0.1", -1, "--port must be between 0 and 65535, not -1"),
    ],
)
def test_wrong_addresses(host: str, port: int, told: str) -> None:
    """An address that is not this machine's, or no address, is one sentence."""
    with pytest.raises(SetupError) as refused:
        listen(host, port)
    assert refused.value.message.startswith(told)
    assert refused.value.message.endswith(".")
