"""``octavo generate`` and ``octavo chat`` with the real model."""

import io
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.main import run
from support import PATIENCE_S

pytestmark = pytest.mark.model
SMALL = ("--kv-cache-memory-bytes", "64M")


def test_generate_prints_json_for_programs(
    model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns red if a field goes missing, counts are wrong, or anything else is printed."""
    args = ["--model", str(model_path), "--max-tokens", "2", "-n", "2", "--json", *SMALL]
    assert run(["generate", "The capital of France is", *args]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    result = json.loads(out)
    assert result["model"] == model_path.stem
    assert [choice["index"] for choice in result["choices"]] == [0, 1]
    assert result["choices"][0]["text"].startswith(" Paris")
    assert {choice["finish_reason"] for choice in result["choices"]} == {"length"}
    assert result["usage"]["prompt_tokens"] == 5
    assert result["usage"]["completion_tokens"] == 4


def test_generate_streams_what_it_prints_whole(
    model_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red if streaming loses or repeats text, or `-` does not read standard input."""
    args = ["--model", str(model_path), "--chat", "--max-tokens", "6", *SMALL]
    assert run(["generate", "What is the capital of France?", *args]) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?"))
    assert run(["generate", "-", "--stream", *args]) == 0
    assert capsys.readouterr().out == whole
    assert "capital of France" in whole


def test_generate_refuses_what_never_fits(
    model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns red if a request beyond the context ends in a traceback."""
    args = ["--model", str(model_path), "--max-model-len", "8", "--max-tokens", "99", *SMALL]
    assert run(["generate", "The capital of France is", *args]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1


def test_chat_through_a_pipe_prints_answers_only(
    model_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red if prompts or notes mix with answers, or a turn forgets the one before."""
    lines = "My name is Ada. Say hello.\n\n/reset\nWhat is the capital of France?\n/exit\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    args = ["--temperature", "0", "--max-tokens", "8", *SMALL]
    assert run(["chat", str(model_path), *args]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    answers = out.splitlines()
    assert answers[-1] == "The capital of France is Paris."


class Terminal:
    """Our end of a terminal. What comes together may be read apart."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unread = b""

    def type(self, line: str) -> None:
        os.write(self._descriptor, line.encode() + b"\n")

    def read_until(self, text: bytes) -> None:
        """Read up to and with this text, which may still have to come."""
        while text not in self._unread:
            ready, _, _ = select.select([self._descriptor], [], [], PATIENCE_S)
            assert ready, f"{text!r} did not come; so far {self._unread!r}"
            self._unread += os.read(self._descriptor, 4096)
        self._unread = self._unread.partition(text)[2]


def test_ctrl_c_stops_the_answer_and_not_the_program(model_path: Path) -> None:
    """Turns red if Ctrl-C during an answer ends the chat, or the engine cannot answer again."""
    octavo = str(Path(sys.executable).with_name("octavo"))
    args = ["--temperature", "0", "--max-tokens", "400", *SMALL]
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [octavo, "chat", str(model_path), *args],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb"},
    ) as process:
        os.close(theirs)
        terminal = Terminal(ours)
        terminal.read_until(b"> ")
        terminal.type("Write a long story about a library.")
        terminal.read_until(b"library.\r\n")
        terminal.read_until(b" ")  # the answer has begun
        process.send_signal(signal.SIGINT)
        terminal.read_until(b"\n> ")
        terminal.type("/reset")
        terminal.read_until(b"> ")
        terminal.type("What is the capital of France?")
        terminal.read_until(b"is Paris.")
        terminal.read_until(b"> ")
        terminal.type("/exit")
        assert process.wait(timeout=PATIENCE_S) == 0
    os.close(ours)
