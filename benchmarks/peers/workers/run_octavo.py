"""Octavo as a worker: the offline ``LLM``, with its real scheduler, sampler and KV cache."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from protocol import Completions, Engine, serve, steps

import octavo
from octavo.engine.factory import EngineSettings
from octavo.kernels.batch import StepBatch


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
        self.settings["precision"] = info.precision

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Completions:
        """Complete the prompts in one call."""
        sampling = octavo.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        return Completions([list(output.outputs[0].token_ids) for output in outputs])

    def logits(self, tokens: list[int], num_single: int) -> Iterator[NDArray[np.float32]]:
        """Call the engine's own step function over blocks scattered through its KV memory."""
        info = self._llm.parts.info
        # No request may see a whole distribution, so no face of the engine leads here.
        step = self._llm.parts.core._runner._step
        num_blocks = -(-len(tokens) // info.block_size)
        blocks = np.random.default_rng(0).permutation(info.num_blocks)[:num_blocks]
        for start, stop in steps(len(tokens), info.max_num_batched_tokens, num_single):
            yield step(_batch(tokens, start, stop, blocks.astype(np.int32), info.block_size))


def _batch(
    tokens: list[int], start: int, stop: int, blocks: NDArray[np.int32], block_size: int
) -> StepBatch:
    """Return the tokens from ``start`` to ``stop`` of one sequence, all their logits wanted."""
    return StepBatch(
        token_ids=np.array(tokens[start:stop], np.int32),
        cu_query_lens=np.array([0, stop - start], np.int32),
        kv_lens=np.array([stop], np.int32),
        block_tables=blocks[None, : -(-stop // block_size)].copy(),
        logits_rows=np.arange(stop - start, dtype=np.int32),
    )


if __name__ == "__main__":
    serve(Octavo)
