"""vLLM's CPU build as a worker: its offline ``LLM``, in this one process."""

from collections.abc import Iterator
from typing import Any

import vllm
from protocol import Engine, serve
from vllm.sampling_params import RequestOutputKind


class VLLM(Engine):
    """``vllm.LLM`` without a tokenizer: prompts are token ids."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = {
            "dtype": "bfloat16",
            "max_model_len": settings["max_model_len"],
            **settings["options"],
        }
        self._llm = vllm.LLM(settings["model"], skip_tokenizer_init=True, seed=0, **self.settings)
        self.version = vllm.__version__

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Complete the prompts in one call."""
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(inputs, _greedy(max_tokens), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stream(self, prompts: list[list[int]], max_tokens: int) -> Iterator[tuple[int, int]]:
        """Step the engine as ``LLM`` does."""
        engine = self._llm.llm_engine
        for index, prompt in enumerate(prompts):
            sampling = _greedy(max_tokens)
            sampling.output_kind = RequestOutputKind.DELTA
            engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                index = int(output.request_id)
                yield from ((index, token) for token in output.outputs[0].token_ids)


def _greedy(max_tokens: int) -> vllm.SamplingParams:
    return vllm.SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )


if __name__ == "__main__":
    serve(VLLM)
