"""What ``octavo serve`` prints, and a whole life of a served model."""

import inspect
import json
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.cli.serve import serve
from octavo.cli.serving import curl_line, describe, url_of
from octavo.engine.factory import EngineSettings
from octavo.engine.outputs import ModelInfo
from support import PATIENCE_S

INFO = ModelInfo(
    served_name="smollm2",
    backend="numpy",
    dtype="float32",
    precision="float32",
    max_model_len=8192,
    vocab_size=49152,
    num_blocks=11650,
    block_size=16,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    scheduling_policy="fcfs",
    enable_prefix_caching=True,
)


def test_the_banner_says_what_an_operator_must_know() -> None:
    """Turns red if model, backend, dtype, blocks, tokens of KV, limits or address go missing."""
    text = describe(INFO, file="f.gguf", url="http://h:1", names=("a", "b"), curl="curl it")
    for part in ("a, b (f.gguf)", "numpy", "float32", "11,650", "186,400", "8,192", "64", "512"):
        assert part in text
    small = replace(INFO, num_blocks=100)
    text += describe(small, file="f.gguf", url="http://h:1", names=("a",), curl="curl it")
    assert "1,600 tokens a request" in text
    for part in ("fcfs", "http://h:1", "curl it", "caching on"):
        assert part in text


def test_defaults_of_flags_are_the_engines() -> None:
    """Turns red if `octavo serve` and `LLM(...)` come to differ in what they do unasked."""
    flags = {name: flag.default for name, flag in inspect.signature(serve).parameters.items()}
    chosen = {"model", "served_model_name", "packed_cache_dir"}
    settings = {item.name: item.default for item in fields(EngineSettings)}
    assert {name: flags[name] for name in settings if name not in chosen} == {
        name: default for name, default in settings.items() if name not in chosen
    }


@pytest.mark.parametrize("model", ["smollm2", "it's", 'a "b" $c', "ü"])
@pytest.mark.parametrize("has_chat", [True, False])
def test_the_curl_line_survives_the_shell(model: str, has_chat: bool) -> None:
    """Turns red if a model name with quotes breaks the line that users paste."""
    words = shlex.split(curl_line("http://h:1", model, has_chat=has_chat, has_key=False))
    body = json.loads(words[-1])
    assert body["model"] == model
    assert ("messages" in body) == has_chat
    assert words[1].endswith("/v1/chat/completions" if has_chat else "/v1/completions")


def test_the_curl_line_names_the_key_but_does_not_show_it() -> None:
    """Turns red if the API key is printed to the terminal and its logs."""
    line = curl_line("http://h:1", "m", has_chat=True, has_key=True)
    assert "$OCTAVO_API_KEY" in line


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]")],
)
def test_the_address_shown_can_be_opened(host: str, shown: str) -> None:
    """Turns red if the printed address is one that no client can connect to."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://{shown}:{port}"


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A server of the default model under vLLM's metric names, and the lines it printed."""
    octavo = str(Path(sys.executable).with_name("octavo"))
    flags = ["--port", "0", "--kv-cache-memory-bytes", "64M", "--metrics-prefix", "vllm:"]
    names = ["--served-model-name", "first", "--served-model-name", "second"]
    with subprocess.Popen(
        [octavo, "serve", str(model_path), *flags, *names, "--api-key", "s3cret"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "curl" in line:
                break
        yield process, lines
        process.kill()


@pytest.mark.model
def test_the_printed_line_gets_an_answer_and_sigterm_ends_the_server(
    server: tuple[subprocess.Popen[str], list[str]],
) -> None:
    """Turns red if the banner comes before the server answers, or SIGTERM is not a clean end."""
    process, lines = server
    assert "first, second (SmolLM2-135M-Instruct.Q4_1.gguf)" in "".join(lines)
    assert "s3cret" not in "".join(lines)
    words = shlex.split(lines[-1])
    body = json.loads(words[-1]) | {"max_tokens": 8}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer s3cret"}
    request = urllib.request.Request(words[1], json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        answer = json.load(response)
    assert answer["model"] == "first"
    assert "Paris" in answer["choices"][0]["message"]["content"]
    base = words[1].removesuffix("/v1/chat/completions")
    with urllib.request.urlopen(f"{base}/metrics", timeout=PATIENCE_S) as response:
        families = {f.name: f for f in text_string_to_metric_families(response.read().decode())}
    tokens = families["vllm:generation_tokens"].samples[0]
    assert tokens.labels == {"model_name": "first", "engine": "0"}
    assert tokens.value == answer["usage"]["completion_tokens"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_S) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
