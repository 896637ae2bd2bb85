"""The comparison with peers: its arithmetic, and that its workers do as they are told."""

import importlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support import REPO

PEERS = REPO / "benchmarks" / "peers"

ECHO = """
import sys
sys.path.insert(0, {workers!r})
from protocol import Engine, serve

class Echo(Engine):
    version, settings = "1", {{}}

    def __init__(self, settings):
        pass

    def generate(self, prompts, max_tokens):
        return [[prompt[0]] * max_tokens for prompt in prompts]

    def stream(self, prompts, max_tokens):
        for _ in range(max_tokens):
            yield from ((index, prompt[0]) for index, prompt in enumerate(prompts))

serve(Echo)
"""
"""A worker that completes a prompt with its first token."""

PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, {peers!r})
from process import Worker

worker = Worker([sys.executable, {script!r}], {{}}, {{}}, Path({log!r}))
print(worker._process.pid, flush=True)
input()
"""
"""A comparison that has loaded an engine and waits."""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the comparison, importable."""
    monkeypatch.syspath_prepend(PEERS)
    return PEERS


@pytest.fixture
def scenarios(peers: Path) -> ModuleType:
    """The module of what is asked of every engine."""
    return importlib.import_module("scenarios")


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """The script of a worker that needs no engine."""
    script = tmp_path / "echo.py"
    script.write_text(ECHO.format(workers=str(PEERS / "workers")))
    return script


@pytest.mark.parametrize(
    ("times_s", "rate"),
    [
        pytest.param([[5.0, 5.5, 6.0]], 2 / 1.0, id="the prompt takes no part"),
        pytest.param([[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]], 4 / 2.0, id="while both decode"),
        pytest.param([[1.0, 1.5], [2.0, 4.0]], 1 / 2.0, id="one ends before the other begins"),
    ],
)
def test_decode_rate(scenarios: ModuleType, times_s: list[list[float]], rate: float) -> None:
    """Turns red if prefill, or the time in which some wait or are done, counts as decoding."""
    assert scenarios.decode_rate(times_s) == pytest.approx(rate)


def test_a_streamed_run_tells_when_tokens_came(peers: Path, echo: Path, tmp_path: Path) -> None:
    """Turns red if times are of other tokens than those returned, or a plain run has any."""
    process = importlib.import_module("process")
    worker = process.Worker([sys.executable, str(echo)], {}, {}, tmp_path / "log")
    try:
        plain = worker.run([[7], [8]], 3)
        streamed = worker.run([[7], [8]], 3, streamed=True)
    finally:
        worker.close()
    assert plain.tokens == streamed.tokens == [[7, 7, 7], [8, 8, 8]]
    assert plain.times_s is None
    assert [len(own) for own in streamed.times_s] == [3, 3]
    assert all(own == sorted(own) and own[-1] <= streamed.wall_s for own in streamed.times_s)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a parent's death")
def test_a_waiting_worker_ends_with_the_comparison(echo: Path, tmp_path: Path) -> None:
    """Turns red if an engine, stopped while others are measured, outlives a killed comparison."""
    text = PARENT.format(peers=str(PEERS), script=str(echo), log=str(tmp_path / "log"))
    parent = subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    descriptor = os.pidfd_open(worker)
    try:
        parent.kill()
        parent.wait()
        has_ended, _, _ = select.select([descriptor], [], [], 60)
        if not has_ended:
            os.kill(worker, signal.SIGKILL)
        assert has_ended
    finally:
        os.close(descriptor)
        parent.stdin.close()
        parent.stdout.close()
