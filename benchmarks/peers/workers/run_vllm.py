"""vLLM's CPU build as a worker: its offline ``LLM``, in this one process."""

from typing import Any

import vllm
from protocol import Completions, Engine, serve


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

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Completions:
        """Complete the prompts in one call."""
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return Completions(tokens)


if __name__ == "__main__":
    serve(VLLM)
