"""Draining as an operator sees it: a process, and signals sent to it."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support import PATIENCE_S
from support_server import CHAT, HELLO, parse_events, texts_of

TESTS = Path(__file__).resolve().parent.parent
BODY = {"messages": HELLO, "max_tokens": 200, "stream": True}
GO_ON = signal.SIGUSR1
"""Lets a server end the answers that it holds back."""
PROGRAM = f"""
import asyncio, sys
from octavo.server.lifecycle import Lifecycle
from octavo.server.listener import listen, serve
from support_server import ScriptedEngine, make_app

sock, lifecycle = listen("127.0.0.1", 0), Lifecycle()
engine = ScriptedEngine(answer=lambda prompt, sampling, index: b"x" * 100, hold_after=3)

def tell():
    asyncio.get_running_loop().add_signal_handler({int(GO_ON)}, engine.resume.set)
    print(sock.getsockname()[1], flush=True)

serve(
    make_app(engine, lifecycle=lifecycle),
    sock,
    lifecycle=lifecycle,
    shutdown_timeout_s=float(sys.argv[1]),
    on_started=tell,
)
print("stopped", engine.is_running)
"""


@contextlib.contextmanager
def server(timeout_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process, which holds back all but the beginning of its answers, and its address."""
    command = [sys.executable, "-c", PROGRAM, str(timeout_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS) as process:
        try:
            assert process.stdout is not None
            yield process, f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def ask(url: str) -> contextlib.AbstractContextManager[httpx.Response]:
    """Begin a stream, which the server has begun to answer then."""
    return httpx.stream("POST", url + CHAT, json=BODY, timeout=PATIENCE_S)


def wait_until_unready(url: str) -> None:
    """Wait until the signal has arrived."""
    while httpx.get(url + "/health", timeout=PATIENCE_S).status_code != 503:
        pass


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_streams_finish(signal_number: int) -> None:
    """HT-15: after SIGTERM (or Ctrl+C) in the middle of a stream the stream completes with
    [DONE], readiness and new requests are 503, liveness is 200, and the exit code is 0."""
    with server(PATIENCE_S) as (process, url), ask(url) as stream:
        received = stream.iter_bytes()
        data = next(received)
        process.send_signal(signal_number)
        wait_until_unready(url)
        assert httpx.get(url + "/live", timeout=PATIENCE_S).status_code == 200
        assert httpx.post(url + CHAT, json=BODY, timeout=PATIENCE_S).status_code == 503
        process.send_signal(GO_ON)
        data += b"".join(received)
        assert texts_of(parse_events(data)) == {0: "x" * 100}
        assert process.communicate(timeout=PATIENCE_S)[0] == "stopped False\n"
        assert process.returncode == 0


def test_the_deadline_ends_streams() -> None:
    """HT-15: a stream longer than the timeout ends with an error event, and the exit code is 0."""
    with server(0.2) as (process, url), ask(url) as stream:
        process.send_signal(signal.SIGTERM)
        text = stream.read().decode()
        assert "shut down before this answer was complete" in text
        assert "[DONE]" not in text
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0


def test_a_second_signal_ends_at_once() -> None:
    """HT-15: whoever does not want to wait sends the signal again."""
    with server(PATIENCE_S) as (process, url), ask(url) as stream:
        received = stream.iter_bytes()
        assert next(received)
        process.send_signal(signal.SIGTERM)
        wait_until_unready(url)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == -signal.SIGTERM


def test_an_idle_server_ends_at_once() -> None:
    """With nothing to finish, the timeout is not waited for, even with a connection kept open."""
    with server(2 * PATIENCE_S) as (process, url), httpx.Client(timeout=PATIENCE_S) as client:
        assert client.get(url + "/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
