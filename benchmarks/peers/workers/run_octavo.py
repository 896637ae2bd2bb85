"""Octavo as a worker: the offline ``LLM``, with its real scheduler, sampler and KV cache."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from protocol import Engine, serve, steps

import octavo
from octavo.core.events import NullObserver
from octavo.engine.factory import EngineSettings
from octavo.engine.output_processor import OutputProcessor
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

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Complete the prompts in one call."""
        outputs = self._llm.generate(prompts, _greedy(max_tokens), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stream(self, prompts: list[list[int]], max_tokens: int) -> Iterator[tuple[int, int]]:
        """Step the engine as ``LLM`` does, text included."""
        parts = self._llm.parts
        processor = OutputProcessor(parts.tokenizer, NullObserver())
        for index, prompt in enumerate(prompts):
            request = parts.requests.build(prompt, _greedy(max_tokens), request_id=str(index))
            processor.add(request)
            parts.core.add(request)
        while len(processor):
            update = parts.core.step()
            for done in processor.process(update.outputs):
                for delta in done.deltas:
                    yield from ((int(done.request_id), token) for token in delta.token_ids)
            processor.settle(update.finished)

    def logits(self, tokens: list[int], num_single: int) -> Iterator[NDArray[np.float32]]:
        """Call the engine's own step function over blocks scattered through its KV memory."""
        info = self._llm.parts.info
        # No request may see a whole distribution, so no face of the engine leads here.
        step = self._llm.parts.core._runner._step
        num_blocks = -(-len(tokens) // info.block_size)
        blocks = np.random.default_rng(0).permutation(info.num_blocks)[:num_blocks]
        for start, stop in steps(len(tokens), info.max_num_batched_tokens, num_single):
            yield step(_batch(tokens, start, stop, blocks.astype(np.int32), info.block_size))


def _greedy(max_tokens: int) -> octavo.SamplingParams:
    return octavo.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


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
