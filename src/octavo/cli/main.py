"""The ``octavo`` command: its subcommands, and how its errors look."""

import contextlib
import os
import sys
from collections.abc import Sequence

import typer

from octavo import __version__
from octavo.cli.chat import chat
from octavo.cli.console import print_error
from octavo.cli.generate import generate
from octavo.cli.pull import pull
from octavo.cli.serve import serve
from octavo.core.errors import RequestError, SetupError

USAGE_ERROR = 2

app = typer.Typer(
    name="octavo",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of flags in 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
    help="An LLM inference server whose KV cache you can see, steer and trust.",
    epilog="Example: octavo serve smollm2 --port 8000",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version."
    ),
) -> None:
    pass


for command, example in (
    (pull, "octavo pull smollm2"),
    (generate, 'octavo generate "The capital of France is" --max-tokens 16'),
    (chat, "octavo chat smollm2 --system 'Answer in one sentence.'"),
    (serve, "octavo serve smollm2 --port 8000 --kv-cache-memory-bytes 2G"),
):
    app.command(epilog=f"Example: {example}")(command)


def run(args: Sequence[str]) -> int:
    """Run one command and return its exit code; an expected error is one sentence on stderr."""
    if not args:
        run(["--help"])
        return USAGE_ERROR
    try:
        code = app(args=list(args), prog_name="octavo", standalone_mode=False)
        if sys.stdout is not None:  # closed by who called us
            sys.stdout.flush()
    except typer.TyperException as error:
        print_error(_usage_sentence(error))
        return error.exit_code
    except (SetupError, RequestError) as error:
        print_error(error.message)
        return 1
    except UnicodeDecodeError:  # standard input is the only text that commands read themselves
        print_error("Standard input is not UTF-8 text.")
        return 1
    except BrokenPipeError:  # the reader has seen enough, as with `| head`
        _drop_output()
        return 1
    except OSError as error:  # what no module below expects: above all, a disk that is full
        _drop_output()
        where = f"{error.filename}: " if error.filename else ""
        print_error(f"{where}{error.strerror or error}")
        return 1
    return code if isinstance(code, int) else 0


def _drop_output() -> None:
    """Let what is still buffered go nowhere, or Python would try to write it once more."""
    with contextlib.suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_sentence(error: typer.TyperException) -> str:
    message = error.format_message().removeprefix("Invalid value: ").replace("Value error, ", "")
    return message or "Name a command; octavo --help lists them."


def main() -> None:
    """Enter from the shell."""
    sys.exit(run(sys.argv[1:]))
