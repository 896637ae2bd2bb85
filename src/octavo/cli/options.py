"""All flags but those of one command alone, declared once; names are vLLM's where the idea is."""

import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

SIZE_UNITS: Final = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


def parse_size(text: str) -> int:
    """Return bytes: ``512M`` and ``512MiB`` are binary, ``512m`` and ``512MB`` decimal."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgtKMGT]?)(iB|B)?", text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 512M, 2G or 4GiB")
    number, unit, ending = match.groups()
    if ending is not None:
        unit = unit.upper() if ending == "iB" else unit.lower()
    return int(Decimal(number) * SIZE_UNITS[unit])


class CpuList(tuple[int, ...]):
    """CPUs in the order of the text; typer reads a plain tuple as a flag with several values."""


def parse_cpus(text: str) -> CpuList:
    """Return the CPUs of a list such as ``0,2-3``, in its order."""
    cpus: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise typer.BadParameter(f"{text!r} is not a list of CPUs such as 0,2-3")
        cpus += range(first, last + 1)
    return CpuList(cpus)


MODEL_HELP: Final = "A .gguf file, a Hugging Face style folder, hf:org/name, or an alias."

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
ModelOption = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs.")]

# The engine
Backend = Annotated[
    Literal["auto", "native", "numpy"],
    typer.Option(help="What computes: native (C++), numpy (the reference), auto: native if built."),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(help="Number format of KV and of weights that are not quantised."),
]
Quantization = Annotated[
    Literal["auto", "none", "file", "int8", "int4"],
    typer.Option(
        help="none: weights in --dtype; file: as the file has them; int8: 8 bits; int4: 4 bits, "
        "8 for the vocabulary. auto: file if that holds quantised weights, else int8; none if "
        "--dtype is given."
    ),
]
KVCacheDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "int8"],
    typer.Option(
        help="Number format of KV; int8 has a scale per token and head: half of bfloat16's memory, "
        "less exact. auto: that of --dtype."
    ),
]
Threads = Annotated[
    int, typer.Option(min=0, help="Threads of a step; 0: all that this process may use.")
]
CpuAffinity = Annotated[
    CpuList | None,
    typer.Option(
        parser=parse_cpus,
        metavar="LIST",
        help="CPUs that the threads of a step stay on, one each, such as 0,2-3.",
        show_default="what this process may use",
    ),
]
KeepPacked = Annotated[
    bool,
    typer.Option(
        "--packed-cache/--no-packed-cache",
        help="Keep packed weights in the cache folder, for a quick next start.",
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Give a request the same tokens and logprobs to the last bit, whatever its "
        "batch-mates, chunks, cache hits and preemptions.",
    ),
]
Isa = Annotated[
    str,
    typer.Option(envvar="OCTAVO_ISA", help="Instruction set of the native kernels, to compare."),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Most tokens of prompt and output together.",
        show_default="what the model was made for",
    ),
]
KVCacheMemoryBytes = Annotated[
    int | None,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        help="Memory for KV, such as 512M, 2G or 4GiB.",
        show_default="4GiB, or 40 % of free memory if less",
    ),
]
MaxNumBatchedTokens = Annotated[
    int, typer.Option(min=1, help="Token budget of a step, prompts and decodes together.")
]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Most sequences that run at once.")]
BlockSize = Annotated[int, typer.Option(min=1, help="Token slots per KV block.")]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Share the KV of equal prefixes.",
    ),
]
ChunkedPrefill = Annotated[
    bool,
    typer.Option(
        "--enable-chunked-prefill/--no-enable-chunked-prefill",
        help="Compute long prompts in chunks beside running requests.",
    ),
]
BatchingPolicy = Annotated[
    Literal["continuous", "static"],
    typer.Option(help="Whether requests join a running batch; static is a baseline to compare."),
]
KVReservation = Annotated[
    Literal["paged", "max", "pow2", "oracle"],
    typer.Option(
        help="KV room taken at a request's start; all but paged are contiguous baselines and need "
        "--no-enable-prefix-caching."
    ),
]
PrefixCache = Annotated[
    Literal["radix", "flat"],
    typer.Option(help="What finds equal prefixes; flat (as in vLLM) is a baseline to compare."),
]
EvictionPolicy = Annotated[
    str,
    typer.Option(
        help="Which cached KV is forgotten first: lru, lfu, slru, cost, predict, or a class of "
        "your own as module:Class."
    ),
]
PinFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="Prefixes to keep in the KV cache once computed, one JSON object a line: "
        '{"text": ...}, {"messages": [...]} or {"token_ids": [...]}, maybe with a cache_salt.',
    ),
]
JumpForward = Annotated[
    bool,
    typer.Option(
        "--enable-jump-forward/--no-enable-jump-forward",
        help="Take tokens that a schema or grammar forces without a forward pass each.",
    ),
]
SchedulingPolicy = Annotated[
    Literal["fcfs", "priority", "cache-aware"],
    typer.Option(help="Order of the queue; cache-aware: longest cached prefix first."),
]
EngineSeed = Annotated[
    int | None,
    typer.Option("--seed", help="Seed of requests that name none.", show_default="drawn"),
]
DebugInvariants = Annotated[
    bool, typer.Option("--debug-invariants", help="Check every invariant after each step (slow).")
]

# The server
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option(
        help="A name that clients may use; may be given several times.",
        show_default="the alias, or the file's stem",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="OCTAVO_API_KEY", help="What clients must send as bearer token."),
]
MaxNumQueuedReqs = Annotated[
    int | None,
    typer.Option(min=0, help="Longest queue before requests get 429.", show_default="no bound"),
]
ToolCallParser = Annotated[
    Literal["auto", "hermes", "llama3", "mistral"],
    typer.Option(help="How the model writes tool calls; auto looks at its chat template."),
]
MetricsPrefix = Annotated[
    str, typer.Option(help="First part of metric names; vllm: fits vLLM's dashboards.")
]
ShutdownTimeout = Annotated[
    float, typer.Option(min=0, help="Seconds that running requests get to finish at the end.")
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], typer.Option(help="How much to log.")
]

# Sampling
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")]
TopK = Annotated[int, typer.Option(help="Keep so many likeliest tokens; 0 keeps all.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one.")]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1 makes tokens that were there already less likely.")
]
Stop = Annotated[
    list[str] | None, typer.Option(help="Text that ends the output; may be given several times.")
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", show_default="drawn")]
