"""Octavo as a worker: the offline ``LLM``, with its real scheduler, sampler and KV cache."""

from dataclasses import fields
from typing import Any

from protocol import Completions, Engine, serve

import octavo
from octavo.engine.factory import EngineSettings


class Octavo(Engine):
    """``octavo.LLM`` with the settings it was asked for."""

    def __init__(self, settings: dict[str, Any]) -> None:
        chosen = dict(settings["options"])
        chosen.setdefault("max_model_len", settings["max_model_len"])
        if "threads" in {field.name for field in fields(EngineSettings)}:
            chosen.setdefault("threads", settings["threads"])
        self._llm = octavo.LLM(settings["model"], **chosen)
        info = self._llm.parts.info
        self.version = octavo.__version__
        self.settings = {**chosen, "backend": info.backend, "dtype": info.dtype}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Completions:
        """Complete the prompts in one call."""
        sampling = octavo.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        return Completions([list(output.outputs[0].token_ids) for output in outputs])


if __name__ == "__main__":
    serve(Octavo)
