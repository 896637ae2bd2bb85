"""Serving on a socket until told to stop, and stopping without cutting anybody off."""

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Final

import uvicorn
from fastapi import FastAPI

from octavo.core.errors import SetupError
from octavo.server.lifecycle import Lifecycle

DEFAULT_SHUTDOWN_TIMEOUT_S: Final = 30.0
GRACE_S: Final = 2.0
"""Time for the last words of requests that the deadline ended."""
BACKLOG: Final = 2048
MAX_PORT: Final = 65535


def listen(host: str, port: int) -> socket.socket:
    """Bind a listening socket before anything slow is done; port 0 takes a free one.

    Raises:
        SetupError: the port is in use, or the address is not this machine's.
    """
    if not 0 <= port <= MAX_PORT:  # getaddrinfo takes it modulo 65536
        raise SetupError(f"--port must be between 0 and {MAX_PORT}, not {port}.")
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = info[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise SetupError(f"Cannot listen on {host} port {port}: {_reason(error)}.") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise SetupError(
                f"Port {port} of {host} is in use: choose another with --port."
            ) from None
        raise SetupError(f"Cannot listen on {host} port {port}: {_reason(error)}.") from None
    return sock


def serve(
    app: FastAPI,
    sock: socket.socket,
    *,
    lifecycle: Lifecycle,
    shutdown_timeout_s: float = DEFAULT_SHUTDOWN_TIMEOUT_S,
    on_started: Callable[[], None] = lambda: None,
) -> None:
    """Serve ``app`` on a listening socket until SIGTERM or SIGINT, then drain and return.

    While draining, requests in progress go on, new ones get 503, and so does readiness. After
    ``shutdown_timeout_s`` what is left ends with an error. A second signal ends the process.
    """
    DrainingServer(
        app, lifecycle, shutdown_timeout_s=shutdown_timeout_s, on_started=on_started
    ).run([sock])


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains on the first signal and dies on the second."""

    def __init__(
        self,
        app: FastAPI,
        lifecycle: Lifecycle,
        *,
        shutdown_timeout_s: float,
        on_started: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="on",
                server_header=False,
                timeout_graceful_shutdown=int(GRACE_S),
            )
        )
        self._lifecycle = lifecycle
        self._shutdown_timeout_s = shutdown_timeout_s
        self._on_started = on_started
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then tell whoever waits for it."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        if self.started:
            self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; at the second let it do what it does by default."""
        if self._lifecycle.is_draining or self._loop is None:
            signal.signal(sig, signal.SIG_DFL)
            os.kill(os.getpid(), sig)
            return
        self._lifecycle.begin_drain()
        self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Drain, then end; call it on the server's loop."""
        self._lifecycle.begin_drain()
        if self._drain is None:
            self._drain = asyncio.ensure_future(self._drain_and_end())

    async def _drain_and_end(self) -> None:
        if not await self._lifecycle.wait_idle(self._shutdown_timeout_s):
            self._lifecycle.expire()
            await self._lifecycle.wait_idle(GRACE_S)
        self.should_exit = True


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.rstrip(".").lower()
