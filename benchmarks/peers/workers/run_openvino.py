"""OpenVINO GenAI as a worker: its continuous batching pipeline on the CPU."""

from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import Completions, Engine, serve


class OpenVINO(Engine):
    """A pipeline over an exported folder."""

    def __init__(self, settings: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        for name, value in settings["options"].items():
            setattr(scheduler, name, value)
        properties = {"INFERENCE_NUM_THREADS": settings["threads"]}
        self._pipe = openvino_genai.ContinuousBatchingPipeline(
            settings["model"], scheduler, "CPU", properties
        )
        self.version = openvino_genai.__version__
        self.settings = {
            **properties,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "cache_size": scheduler.cache_size,
        }

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Completions:
        """Add all prompts at once and step until they are done."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = self._pipe.generate(inputs, [config] * len(inputs))
        tokens = [list(result.m_generation_ids[0]) for result in results]
        return Completions(tokens)


if __name__ == "__main__":
    serve(OpenVINO)
