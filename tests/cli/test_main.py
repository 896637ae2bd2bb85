"""The command line without a model: help, weight of imports, and errors of one sentence."""

import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.console import byte_progress
from octavo.cli.main import app, run

COMMANDS = ("pull", "generate", "chat", "serve")


def _error(capsys: pytest.CaptureFixture[str], args: list[str]) -> tuple[int, str]:
    """Return exit code and the only line on standard error."""
    code = run(args)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("Error: ")
    assert "Traceback" not in err
    assert err.rstrip().endswith((".", "`"))
    return code, err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Turns red if a command loses its example."""
    assert run([command, "--help"]) == 0
    assert f"Example: octavo {command} " in capsys.readouterr().out


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Turns red if a command is not reachable."""
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)
    assert {info.name or info.callback.__name__ for info in app.registered_commands} == set(  # type: ignore[union-attr]
        COMMANDS
    )


FLAGS = [
    "--host",
    "--port",
    "--served-model-name",
    "--dtype",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--block-size",
    "--kv-cache-memory-bytes",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--enable-chunked-prefill",
    "--no-enable-chunked-prefill",
    "--enable-jump-forward",
    "--no-enable-jump-forward",
    "--scheduling-policy",
    "--api-key",
    "--seed",
    "--metrics-prefix",
    "--backend",
    "--shutdown-timeout",
    "--log-level",
    "--debug-invariants",
]


def test_flags_can_be_read_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red if help cuts the names of flags, or a flag that vLLM's users know is renamed."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["serve", "--help"]) == 0
    words = capsys.readouterr().out.split()
    assert [flag for flag in FLAGS if flag not in words] == []


@pytest.mark.parametrize("args", [["--help"], *([command, "--help"] for command in COMMANDS)])
def test_help_loads_nothing_heavy(args: list[str]) -> None:
    """Turns red if a module-level import makes `--help` wait for libraries it does not need."""
    code = (
        "import sys\n"
        "from octavo.cli.main import run\n"
        f"run({args!r})\n"
        "heavy = {'numpy', 'fastapi', 'uvicorn', 'tokenizers', 'gguf', 'safetensors', 'torch',\n"
        "         'jinja2', 'prometheus_client', 'huggingface_hub', 'octavo.engine.factory'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.strip() == "[]"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Turns red if --version prints more or less than name and number."""
    assert run(["--version"]) == 0
    name, number = capsys.readouterr().out.split()
    assert name == "octavo"
    assert number[0].isdigit()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nonsense"], "nonsense"),
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["serve", "--dtype", "float7"], "float7"),
        (["serve", "--backend", "abacus"], "abacus"),
        (["serve", "--scheduling-policy", "lifo"], "lifo"),
        (["serve", "--log-level", "loud"], "loud"),
        (["serve", "--max-num-seqs", "-1"], "--max-num-seqs"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["serve", "--max-num-batched-tokens", "-5"], "--max-num-batched-tokens"),
        (["serve", "--max-model-len", "-5"], "--max-model-len"),
        (["serve", "--block-size", "0"], "--block-size"),
        (["serve", "--block-size", "sixteen"], "--block-size"),
        (["serve", "--cpu-affinity", "0-"], "'0-'"),
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["serve", "--kv-cache-memory-bytes", "-1"], "--kv-cache-memory-bytes"),
        (["serve", "--kv-cache-memory-bytes", "2 cups"], "2 cups"),
        (["serve", "one", "two"], "two"),
        (["generate"], "prompt"),
        (["generate", "x", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "x", "--max-tokens", "-1"], "--max-tokens"),
        (["generate", "x", "--stream", "--json"], "--stream"),
        (["generate", "x", "--stream", "-n", "2"], "--stream"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns red if a wrong flag or value passes silently, or prints pages."""
    code, err = _error(capsys, args)
    assert code == 2
    assert words in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "/no/such/file", "--port", "0"], "/no/such/file"),
        (["serve", "smolm2", "--port", "0"], "smollm2"),
        (["serve", "--api-key", ""], "--api-key"),
        (["serve", "--served-model-name", ""], "--served-model-name"),
        (["generate", "x", "--model", "/no/such.gguf"], "/no/such.gguf"),
        (["generate", "x", "--model", "nope"], "smollm2"),
        (["generate", "--cpu-affinity", "0", "x", "--model", "nope"], "smollm2"),
        (["chat", "/no/such/folder/"], "/no/such/folder/"),
        (["pull", "nope"], "smollm2"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--temperature", "nan"], "temperature"),
        (["generate", "x", "--top-p", "0"], "top_p"),
        (["generate", "x", "--stop", ""], "stop"),
        (["chat", "--repetition-penalty", "-2"], "repetition_penalty"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_exit_code_1(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns red if a missing model or a value out of range ends in a traceback."""
    code, err = _error(capsys, args)
    assert code == 1
    assert words in err


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_in_the_environment_is_refused(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red if a service whose secret failed to arrive is open to everybody."""
    monkeypatch.setenv("OCTAVO_API_KEY", key)
    code, err = _error(capsys, ["serve"])
    assert code == 1
    assert "OCTAVO_API_KEY" in err


@pytest.mark.parametrize("command", [["serve"], ["chat"], ["generate", "x", "--model"]])
@pytest.mark.parametrize("content", [b"hello, world\n" * 100, b"", b"GGUF", b"GGUF\x03\0\0\0\xff"])
def test_a_text_file_renamed_to_gguf_is_one_sentence(
    command: list[str], content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns red if a file that is no model ends in a traceback or is served."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    ports = ["--port", "0"] if command == ["serve"] else []
    code, err = _error(capsys, [*command, str(path), *ports])
    assert code == 1
    assert "model.gguf" in err


def test_a_port_in_use_is_told_before_the_model_is_looked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Turns red if the port is only tried after minutes of loading."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, err = _error(capsys, ["serve", "/no/such/file", "--port", str(port)])
    assert code == 1
    assert str(port) in err
    assert "in use" in err


def test_a_host_that_is_not_ours_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Turns red if an address of another machine ends in a traceback."""
    code, err = _error(capsys, ["serve", "--host", "192.0.2.1", "--port", "0"])
    assert code == 1
    assert "192.0.2.1" in err


def test_the_shell_command_passes_on_its_exit_code() -> None:
    """Turns red if the entry point swallows the exit code, or warns on the way out."""
    script = Path(sys.executable).with_name("octavo")
    result = subprocess.run(
        [script, "serve", "/no/such/file", "--port", "0"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1


def test_progress_into_a_log_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Turns red if a download without a terminal is silent, or fills the log."""
    with byte_progress("Fetching tiny") as show:
        assert capsys.readouterr().err == ""
        for done in range(0, 5_000_001, 1_000_000):
            show(done, 5_000_000)
    assert capsys.readouterr().err == "Fetching tiny (5 MB) ...\n"


def test_input_that_is_no_text_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red if binary standard input ends in a traceback."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    code, err = _error(capsys, ["generate", "-", "--model", "/no/such/file"])
    assert code == 1
    assert "UTF-8" in err


def test_a_metrics_prefix_that_no_name_can_have_is_told_before_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns red if a mistyped prefix is only found when Prometheus cannot read the metrics."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"no model")
    code, err = _error(capsys, ["serve", str(path), "--port", "0", "--metrics-prefix", "a b"])
    assert code == 1
    assert "--metrics-prefix" in err


def test_without_arguments_the_help_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Turns red if a newcomer who types only ``octavo`` gets the help as one line of error."""
    assert run([]) == 2
    out, err = capsys.readouterr()
    assert err == ""
    assert "\nCommands:\n  pull " in out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("args", [["--version"], ["--help"], ["serve", "--help"]])
def test_output_that_cannot_be_written_is_one_sentence(args: list[str]) -> None:
    """Turns red if a full disk ends in a traceback, or in success."""
    script = Path(sys.executable).with_name("octavo")
    with Path("/dev/full").open("w") as full:
        result = subprocess.run([script, *args], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    assert result.stderr == "Error: No space left on device.\n"


@pytest.mark.parametrize("args", [["--version"], ["--help"]])
def test_a_reader_that_has_left_is_no_error_to_tell(args: list[str]) -> None:
    """Turns red if ``octavo … | head`` ends in a traceback."""
    script = Path(sys.executable).with_name("octavo")
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([script, *args], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.parametrize("args", [["generate", "-"], ["chat"]])
def test_closed_standard_input_is_one_sentence(
    args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red if a service manager that closes standard input gets a traceback."""
    monkeypatch.setattr(sys, "stdin", None)
    code, err = _error(capsys, args)
    assert code == 1
    assert "Standard input is closed" in err
