"""``octavo generate``: complete one prompt and print the text."""

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli import options
from octavo.cli.console import standard_input
from octavo.core.sampling import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.outputs import GenerationDelta


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    model: options.ModelOption = "smollm2",
    is_chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt through the model's chat template.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    as_json: options.Json = False,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Number of completions.")] = 1,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    stop: options.Stop = None,
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
    """Complete a prompt with a model in this process."""
    if stream and (as_json or n > 1):
        raise typer.BadParameter("--stream goes neither with --json nor with more than one -n")
    sampling = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=tuple(stop or ()),
        seed=seed,
    )
    text = standard_input().read() if prompt == "-" else prompt
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
        if is_chat:
            tokens = session.chat_prompt([{"role": "user", "content": text}])
        else:
            tokens = session.text_prompt(text)
        result = _Result(stream=stream)
        session.ask(tokens, sampling, result.take)
        result.show(session.served_name, as_json=as_json)


@dataclass(slots=True)
class _Result:
    """Completions as they grow."""

    stream: bool
    texts: dict[int, list[str]] = field(default_factory=dict)
    last: dict[int, "GenerationDelta"] = field(default_factory=dict)

    def take(self, delta: "GenerationDelta") -> None:
        self.texts.setdefault(delta.index, []).append(delta.text)
        self.last[delta.index] = delta
        if self.stream:
            print(delta.text, end="", flush=True)

    def show(self, model: str, *, as_json: bool) -> None:
        if as_json:
            print(json.dumps(self._facts(model), ensure_ascii=False))
        elif self.stream:
            print()
        else:
            for index in sorted(self.texts):
                print("".join(self.texts[index]))

    def _facts(self, model: str) -> dict[str, object]:
        first = self.last[min(self.last)]
        return {
            "model": model,
            "choices": [
                {
                    "index": index,
                    "text": "".join(self.texts[index]),
                    "finish_reason": delta.finish_reason,
                    "stop_reason": delta.stop_reason,
                }
                for index, delta in sorted(self.last.items())
            ],
            "usage": {
                "prompt_tokens": first.num_prompt_tokens,
                "completion_tokens": sum(item.num_generated_tokens for item in self.last.values()),
                "cached_tokens": first.num_cached_tokens,
            },
        }
