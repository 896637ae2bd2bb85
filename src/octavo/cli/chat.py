"""``octavo chat``: talk with a model in the terminal, or through a pipe."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli import options
from octavo.cli.console import print_error, print_note, standard_input
from octavo.core.errors import RequestError
from octavo.core.sampling import SamplingParams

if TYPE_CHECKING:
    from octavo.cli.session import Session
    from octavo.engine.outputs import GenerationDelta

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer."


def chat(
    model: options.ModelArgument = "smollm2",
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 0.95,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    backend: options.Backend = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    kv_cache_dtype: options.KVCacheDtype = "auto",
    threads: options.Threads = 0,
    cpu_affinity: options.CpuAffinity = None,
    packed_cache: options.KeepPacked = True,
    deterministic: options.Deterministic = False,
    isa: options.Isa = "auto",
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory_bytes: options.KVCacheMemoryBytes = None,
) -> None:
    """Talk with a model in this process; answers stream as they come.

    Each line of input is a message. From a pipe, answers are all that is printed.
    """
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    source = standard_input()
    from octavo.cli.session import EngineChoices, open_session

    choices = EngineChoices(
        backend=backend,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        cpu_affinity=cpu_affinity,
        packed_cache=packed_cache,
        deterministic=deterministic,
        isa=isa,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
    )
    with open_session(model, choices) as session:
        conversation = Conversation(session, sampling, system)
        if source.isatty():
            _talk_with_person(conversation, session.served_name)
        else:
            for line in source:
                if not _respond(conversation, line.strip()):
                    break


class Conversation:
    """What was said, and how to go on."""

    def __init__(self, session: "Session", sampling: SamplingParams, system: str | None) -> None:
        self._session = session
        self._sampling = sampling
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)

    def reset(self) -> None:
        """Forget all but the system message."""
        self._messages = list(self._opening)

    def answer(self, text: str, write: Callable[[str], object]) -> None:
        """Say ``text`` and write the answer as it comes; a stopped one stays as far as it got.

        Raises:
            RequestError: it cannot be answered; the conversation is as before.
            KeyboardInterrupt: the user pressed Ctrl-C.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        pieces: list[str] = []

        def take(delta: "GenerationDelta") -> None:
            pieces.append(delta.text)
            write(delta.text)

        prompt = self._session.chat_prompt(messages)
        try:
            self._session.ask(prompt, self._sampling, take)
        except KeyboardInterrupt:
            self._keep(messages, pieces)
            raise
        self._keep(messages, pieces)

    def _keep(self, messages: list[dict[str, str]], pieces: list[str]) -> None:
        self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


def _respond(conversation: Conversation, line: str) -> bool:
    """Do what the line says; False to leave."""
    match line:
        case "/exit" | "/quit":
            return False
        case "/reset":
            conversation.reset()
        case "":
            pass
        case _ if line.startswith("/"):
            print_note(HELP)
        case _:
            conversation.answer(line, _write)
            print()
    return True


def _talk_with_person(conversation: Conversation, model: str) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() history and editing

    print_note(f"Talking with {model}. {HELP}")
    while True:
        try:
            if not _respond(conversation, input("> ").strip()):
                return
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except RequestError as error:
            print_error(error.message)


def _write(text: str) -> None:
    print(text, end="", flush=True)
