"""OpenVINO GenAI as a worker: its continuous batching pipeline on the CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from numpy.typing import NDArray
from protocol import Engine, serve, steps


class OpenVINO(Engine):
    """A pipeline over an exported folder."""

    def __init__(self, settings: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        for name, value in settings["options"].items():
            setattr(scheduler, name, value)
        self._model = Path(settings["model"]) / "openvino_model.xml"
        self._request: Any = None
        self._budget = scheduler.max_num_batched_tokens
        self._properties = properties = {"INFERENCE_NUM_THREADS": settings["threads"]}
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

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Complete the prompts in one call."""
        inputs = [_tensor(prompt) for prompt in prompts]
        results = self._pipe.generate(inputs, [_greedy(max_tokens)] * len(inputs))
        return [list(result.m_generation_ids[0]) for result in results]

    def stream(self, prompts: list[list[int]], max_tokens: int) -> Iterator[tuple[int, int]]:
        """Add all prompts at once and step until they are done."""
        handles = [
            self._pipe.add_request(index, _tensor(prompt), _greedy(max_tokens))
            for index, prompt in enumerate(prompts)
        ]
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        yield from ((index, token) for token in output.generated_ids)

    def logits(self, tokens: list[int], num_single: int) -> Iterator[NDArray[np.float32]]:
        """Run the exported model itself, as the pipeline gives no logits.

        Steps, weights and the cache's number format are the pipeline's.
        """
        if self._request is None:
            model = openvino.Core().compile_model(self._model, "CPU", self._properties)
            self._request = model.create_infer_request()
        request = self._request
        request.reset_state()
        for start, stop in steps(len(tokens), self._budget, num_single):
            inputs = {
                "input_ids": np.array([tokens[start:stop]], np.int64),
                "attention_mask": np.ones((1, stop), np.int64),
                "position_ids": np.arange(start, stop, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            request.infer(inputs)
            yield request.get_tensor("logits").data[0]


def _tensor(prompt: list[int]) -> openvino.Tensor:
    return openvino.Tensor(np.array([prompt], np.int64))


def _greedy(max_tokens: int) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    serve(OpenVINO)
