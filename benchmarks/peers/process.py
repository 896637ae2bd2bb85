"""The comparison's side of a worker: a process in a peer's own environment."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

LOAD_TIMEOUT_S: Final = 1800
"""vLLM compiles on its first start."""
RUN_TIMEOUT_S: Final = 900


class WorkerError(Exception):
    """A worker failed; the text is one sentence about why."""


@dataclass(frozen=True, slots=True)
class Run:
    """One timed batch."""

    wall_s: float
    tokens: list[list[int]]
    times_s: list[list[float]] | None
    """When each token came, of a streamed run."""


class Worker:
    """A loaded engine in its own process, stopped while others are measured.

    An idle engine may spin, and a core that spins is a core that the measured one lacks.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: Mapping[str, Any],
        env: Mapping[str, str],
        log: Path,
    ) -> None:
        self._log = log
        self._buffer = b""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [*command, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**os.environ, **env},
                start_new_session=True,
            )
        try:
            ready = self._read(LOAD_TIMEOUT_S)
        except BaseException:  # an interrupt too must not leave it behind
            self.close()
            raise
        self.load_s: float = ready["load_s"]
        self.version: str = ready["version"]
        self.settings: dict[str, Any] = ready["settings"]
        self._signal(signal.SIGSTOP)

    def idle(self, seconds: float) -> None:
        """Let it do what it does when nobody asks for anything."""
        self._signal(signal.SIGCONT)
        time.sleep(seconds)
        self._signal(signal.SIGSTOP)

    def run(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, streamed: bool = False
    ) -> Run:
        """Complete the prompts together.

        Raises:
            WorkerError: the engine failed, died or took too long.
        """
        request = {"prompts": prompts, "max_tokens": max_tokens, "streamed": streamed}
        answer = self._ask(request)
        return Run(answer["wall_s"], answer["tokens"], answer["times_s"])

    def score(self, tokens: Sequence[int], num_single: int, file: Path) -> None:
        """Write the logits of each token to ``file``, float32 ``[tokens, vocab]``.

        The last ``num_single`` tokens are computed one at a time, as in decoding.

        Raises:
            WorkerError: the engine failed, died, took too long or gives no logits.
        """
        self._ask({"score": tokens, "num_single": num_single, "file": str(file)})

    def close(self) -> None:
        """End the process and whatever it started."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Let it run for one request."""
        self._signal(signal.SIGCONT)
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write((json.dumps(request) + "\n").encode())
            stdin.flush()
        except OSError as error:
            raise WorkerError(f"It has ended; see {self._log}.") from error
        answer = self._read(RUN_TIMEOUT_S)
        self._signal(signal.SIGSTOP)
        return answer

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        stdout = self._process.stdout
        assert stdout is not None
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([stdout], [], [], max(0.0, left))
            chunk = os.read(stdout.fileno(), 1 << 20) if ready else b""
            if not ready:
                raise WorkerError(f"It gave no answer in {timeout_s:.0f} s; see {self._log}.")
            if not chunk:
                raise WorkerError(f"It ended without an answer; see {self._log}.")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if answer["event"] == "error":
            raise WorkerError(f"{answer['message']} (see {self._log})")
        return answer
