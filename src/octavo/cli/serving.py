"""Puts a server together around an engine, and says what it serves once it does."""

import json
import logging
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.errors import SetupError
from octavo.engine.factory import EngineSettings, async_engine, build_engine
from octavo.engine.outputs import ModelInfo
from octavo.observe.prometheus import CacheInfo, PrometheusObserver
from octavo.server.app import build_app
from octavo.server.lifecycle import Lifecycle
from octavo.server.listener import serve
from octavo.server.tools.styles import style_named

QUESTION = "What is the capital of France?"


@dataclass(frozen=True, slots=True)
class ServerChoices:
    """What a user may choose about the server around the engine."""

    served_model_names: tuple[str, ...]
    """Names that clients may use; the first is the default."""
    api_key: str | None
    metrics_prefix: str
    max_num_queued_reqs: int | None
    """Longest queue before requests are refused; None: no bound."""
    shutdown_timeout_s: float
    tool_call_parser: str = "auto"
    """How the model writes tool calls; ``auto`` looks at its chat template."""


def run_server(settings: EngineSettings, choices: ServerChoices, listener: socket.socket) -> None:
    """Load the model and serve it on the socket until a signal ends it.

    Raises:
        SetupError: a setting or the model is wrong, or the server does not start.
    """
    observer = PrometheusObserver(
        model_name=choices.served_model_names[0], prefix=choices.metrics_prefix
    )
    parts = build_engine(settings, observer)
    info = parts.info
    cache = CacheInfo(info.block_size, info.num_blocks, info.enable_prefix_caching, info.dtype)
    observer.configure(cache, max_model_len=info.max_model_len)
    queue = choices.max_num_queued_reqs
    parser = choices.tool_call_parser
    lifecycle = Lifecycle()
    app = build_app(
        async_engine(parts),
        served_model_names=choices.served_model_names,
        metrics=observer.render,
        api_key=choices.api_key,
        observer=observer,
        lifecycle=lifecycle,
        max_num_inflight=None if queue is None else info.max_num_seqs + queue,
        tool_style=None if parser == "auto" else style_named(parser),
    )
    has_chat = parts.tokenizer.chat_template is not None
    banner = describe(
        info,
        file=settings.model.name,
        url=url_of(listener),
        names=choices.served_model_names,
        curl=curl_line(
            url_of(listener),
            choices.served_model_names[0],
            has_chat=has_chat,
            has_key=choices.api_key is not None,
        ),
    )
    starts: list[bool] = []

    def on_started() -> None:
        starts.append(True)
        print(banner, flush=True)

    serve(
        app,
        listener,
        lifecycle=lifecycle,
        shutdown_timeout_s=choices.shutdown_timeout_s,
        on_started=on_started,
    )
    if not starts and not lifecycle.is_draining:
        raise SetupError("The server could not start: the log says why.")


def set_up_logging(level: str) -> None:
    """Log to standard error from this level on."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), format=form)
    if level == "info":  # our own banner says it better
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


def url_of(listener: socket.socket) -> str:
    """Return an address under which this machine itself reaches the socket."""
    host, port = listener.getsockname()[:2]
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{local}]:{port}" if ":" in local else f"http://{local}:{port}"


def describe(info: ModelInfo, *, file: str, url: str, names: Sequence[str], curl: str) -> str:
    """Return what an operator should know: model, memory, limits, address, and a line to try."""
    caching = "on" if info.enable_prefix_caching else "off"
    weights = "as in the file" if info.precision == "file" else info.precision
    longest = min(info.max_model_len, info.num_kv_tokens)
    rows = {
        "model": f"{', '.join(names)} ({file})",
        "backend": f"{info.backend}; weights {weights}, KV {info.dtype}",
        "KV cache": f"{info.num_blocks:,} blocks of {info.block_size} tokens: "
        f"{info.num_kv_tokens:,} tokens fit; prefix caching {caching}",
        "limits": f"{longest:,} tokens a request, {info.max_num_seqs:,} sequences at "
        f"once, {info.max_num_batched_tokens:,} tokens a step; {info.scheduling_policy} queue",
        "address": f"{url} (/v1/..., /health, /metrics, /docs)",
    }
    lines = [f"  {name:<9} {text}" for name, text in rows.items()]
    return "\n".join(["Octavo is ready.", *lines, "", "Try it:", f"  {curl}"])


def curl_line(url: str, model: str, *, has_chat: bool, has_key: bool) -> str:
    """Return a command that asks the server a question; the key itself is never shown."""
    if has_chat:
        path = "/v1/chat/completions"
        asked: dict[str, object] = {"messages": [{"role": "user", "content": QUESTION}]}
    else:
        path = "/v1/completions"
        asked = {"prompt": "The capital of France is", "max_tokens": 16}
    body = json.dumps({"model": model, **asked, "temperature": 0}, ensure_ascii=False)
    key = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if has_key else ""
    return f"curl {url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
