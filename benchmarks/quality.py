"""What each number format costs: next-token distributions on real text against float32's.

    python benchmarks/quality.py [--octavo NAME:setting=value,... ...] [--peers NAME ...] [--json F]

Each engine reads the same documents (mt-bench questions and the ends of coding agents' prompts,
from the project's shared traces), and the logits of every token are compared with those of the
file's own weights in float32: mean and 99th percentile of the KL divergence over the whole
vocabulary, perplexity of the text, and how often both find the same token the likeliest. Contexts
are computed in steps of the engine's own size over its own KV cache; the last tokens of each are
computed a second time one by one, as in decoding. Peers are those of ``peers/`` that give logits.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from quality_metrics import Float32, Quality, TokenScores, compare_logits
from quality_report import Report, Result, markdown
from quality_texts import Document, NoTexts, documents

sys.path.append(str(Path(__file__).with_name("peers")))
from command_line import check_peers, say, unwind_on_sigterm
from conversions import ModelFormats
from environments import PeerUnavailable, peers_cache
from process import Worker, WorkerError
from variants import PEER_VARIANTS, Launcher, Variant, octavo_variant

from octavo.core.errors import SetupError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.source import default_cache_dir, resolve_model
from octavo.models.tokenizer import load_tokenizer

REFERENCE: Final = "float32:dtype=float32,quantization=none"
OCTAVOS: Final = (
    "auto",
    "auto-kv-int8:kv_cache_dtype=int8",
    "bfloat16:dtype=bfloat16,quantization=none",
    "int8:quantization=int8",
)
PEERS: Final = ("openvino-int8", "llama.cpp-q8_0", "llama.cpp-q4_1", "llama.cpp-bf16")
DEFAULT_TRACES: Final = Path(__file__).resolve().parents[2] / "shared" / "traces"


@dataclass(frozen=True)
class Logits:
    """Where an engine's logits go, and how a document's are read back."""

    folder: Path
    vocab_size: int

    def made(self, worker: Worker, tokens: Sequence[int], num_single: int, name: str) -> Float32:
        """Let the engine compute a document; return its logits ``[tokens, vocab]``, mapped."""
        file = self.folder / name
        worker.score(tokens, num_single, file)
        if file.stat().st_size != 4 * len(tokens) * self.vocab_size:
            raise WorkerError(f"Its vocabulary is not of {self.vocab_size} tokens.")
        return np.memmap(file, np.float32, "r").reshape(len(tokens), self.vocab_size)


@dataclass(frozen=True)
class Reference:
    """The documents and their logits in float32."""

    texts: Sequence[Document]
    logits: Sequence[Float32]

    @classmethod
    def of(cls, worker: Worker, texts: Sequence[Document], out: Logits) -> "Reference":
        """Compute them."""
        names = [f"reference-{index}" for index in range(len(texts))]
        pairs = zip(texts, names, strict=True)
        return cls(texts, [out.made(worker, text.tokens, 0, name) for text, name in pairs])

    def measure(self, name: str, worker: Worker, num_single: int, out: Logits) -> Result:
        """Compare an engine with it; the last token of a document has no next one to score."""
        together: list[TokenScores] = []
        tails: list[TokenScores] = []
        tails_single: list[TokenScores] = []
        for text, expected in zip(self.texts, self.logits, strict=True):
            following = np.array(text.tokens[1:])
            count = min(num_single, len(following))
            found = out.made(worker, text.tokens, 0, "together")
            together.append(compare_logits(expected[:-1], found[:-1], following))
            tails.append(together[-1].last(count))
            found = out.made(worker, text.tokens, count + 1, "single")
            tail = slice(-count - 1, -1)
            tails_single.append(compare_logits(expected[tail], found[tail], following[-count:]))
        return Result(
            name=name,
            settings=worker.settings,
            together=Quality.of(TokenScores.joined(together)),
            tails=Quality.of(TokenScores.joined(tails)),
            tails_single=Quality.of(TokenScores.joined(tails_single)),
        )


@contextmanager
def working(launcher: Launcher, variant: Variant) -> Iterator[Worker]:
    """Have an engine loaded while the block runs."""
    say(f"Computing {variant.name} ...")
    worker = launcher.start(variant)
    try:
        yield worker
    finally:
        worker.close()


def run(arguments: argparse.Namespace) -> Report:
    """Measure all engines, one after the other."""
    cache = peers_cache(arguments.cache)
    source = resolve_model(arguments.model, cache_dir=default_cache_dir()).path
    texts, vocab_size = _texts(source, arguments)
    longest = max(len(text.tokens) for text in texts)
    launcher = Launcher(ModelFormats.of(source, cache), cache, arguments.threads, longest, say)
    results: list[Result] = []
    absent: dict[str, str] = {}
    with TemporaryDirectory(prefix="octavo-quality-") as folder:
        out = Logits(Path(folder), vocab_size)
        reference_variant = octavo_variant(arguments.reference)
        with working(launcher, reference_variant) as worker:
            reference = Reference.of(worker, texts, out)
        for variant in _variants(arguments):
            try:
                with working(launcher, variant) as worker:
                    results.append(reference.measure(variant.name, worker, arguments.single, out))
            except (PeerUnavailable, WorkerError) as error:
                absent[variant.name] = str(error)
                say(f"{variant.name} stays out: {error}")
    sizes: dict[str, int] = {}
    for text in texts:
        sizes[text.source] = sizes.get(text.source, 0) + len(text.tokens)
    return Report(
        source.name, reference_variant.name, sizes, longest, tuple(results), absent, _peer_of()
    )


def _texts(source: Path, arguments: argparse.Namespace) -> tuple[list[Document], int]:
    checkpoint = open_checkpoint(source)
    config = checkpoint.config
    tokenizer = load_tokenizer(checkpoint.tokenizer_source, model_vocab_size=config.vocab_size)
    context = min(arguments.context, config.max_position)
    texts = documents(
        arguments.traces, tokenizer.encode, num_tokens=arguments.tokens, context=context
    )
    return texts, config.vocab_size


def _variants(arguments: argparse.Namespace) -> list[Variant]:
    octavos = [octavo_variant(text) for text in arguments.octavo or OCTAVOS]
    wanted = arguments.peers
    return octavos + [v for v in PEER_VARIANTS if v.name in wanted or v.peer in wanted]


def _peer_of() -> dict[str, str]:
    return {variant.name: variant.peer for variant in PEER_VARIANTS}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="a GGUF file or an alias")
    add("--traces", type=Path, default=DEFAULT_TRACES, help="folder with mt-bench and miniswe")
    add("--reference", default=REFERENCE, help="NAME:setting=value,...: Octavo in float32")
    add("--octavo", action="append", help="NAME:setting=value,...; once for each variant of Octavo")
    add(
        "--peers", nargs="*", default=list(PEERS), help="peers or their variants; none: Octavo only"
    )
    add("--tokens", type=int, default=3072, help="of text in all")
    add("--context", type=int, default=1536, help="most tokens of a document")
    add("--single", type=int, default=128, help="last tokens of each computed one at a time too")
    add("--threads", type=int, default=2, help="of each engine")
    add("--cache", help="folder of environments and models")
    add("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    check_peers(parser, arguments.peers)
    for name in ("tokens", "context", "single"):
        if getattr(arguments, name) < 2:
            parser.error(f"--{name} must be at least 2")
    return arguments


def main() -> int:
    """Measure, print the tables and write the figures."""
    unwind_on_sigterm()
    arguments = _arguments()
    try:
        report = run(arguments)
    except (NoTexts, SetupError, WorkerError) as error:
        say(str(error))
        return 1
    print(markdown(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    return 0 if report.results else 1


if __name__ == "__main__":
    sys.exit(main())
