"""llama.cpp as a worker: its own library, driven batch by batch as its server drives it.

The high-level Python class completes one prompt at a time, so this loop puts all sequences into
one batch per step: prompts first, then one token of each sequence a step.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from protocol import Engine, serve, steps

N_BATCH = 2048
N_UBATCH = 512
CELLS_STEP = 256


class Entry(NamedTuple):
    """One token of a batch."""

    token: int
    position: int
    sequence: int
    wants_logits: bool


class LlamaCpp(Engine):
    """A model and one context, remade when a batch of another shape comes."""

    def __init__(self, settings: dict[str, Any]) -> None:
        llama_cpp.llama_backend_init()
        self._threads = settings["threads"]
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {settings['model']}")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(N_BATCH, 0, 1)
        self._context: Any = None
        self._shape: tuple[int, int, bool] | None = None
        self.version = llama_cpp.__version__
        self.settings = {"n_batch": N_BATCH, "n_ubatch": N_UBATCH, "threads": self._threads}

    def prepare(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Make a context that just holds the batch, with each sequence's cells apart.

        Where lengths differ much, one pool for all takes far less memory.
        """
        lengths = [_rounded(len(prompt) + max_tokens) for prompt in prompts]
        unified = sum(lengths) < max(lengths) * len(lengths) / 2
        cells = sum(lengths) if unified else max(lengths) * len(lengths)
        shape = (len(prompts), cells, unified)
        if shape == self._shape:
            return
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = cells, N_BATCH, N_UBATCH
        params.n_seq_max = len(prompts)
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = unified
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._shape = shape
        if not self._context:
            raise RuntimeError(f"llama.cpp could not make a context of {cells} cells")

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Gather the stream: it is all there is."""
        tokens: list[list[int]] = [[] for _ in prompts]
        for index, token in self.stream(prompts, max_tokens):
            tokens[index].append(token)
        return tokens

    def stream(self, prompts: list[list[int]], max_tokens: int) -> Iterator[tuple[int, int]]:
        """Prefill in batches of N_BATCH tokens, then decode all sequences together."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        last = [0] * len(prompts)
        entries = [
            Entry(token, position, index, position == len(prompt) - 1)
            for index, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for first in range(0, len(entries), N_BATCH):
            for index, token in self._decode(entries[first : first + N_BATCH]):
                last[index] = token
                yield index, token
        for step in range(max_tokens - 1):
            rows = [
                Entry(last[index], len(prompt) + step, index, True)
                for index, prompt in enumerate(prompts)
            ]
            for index, token in self._decode(rows):
                last[index] = token
                yield index, token

    def logits(self, tokens: list[int], num_single: int) -> Iterator[NDArray[np.float32]]:
        """Compute one sequence from an empty cache."""
        self.prepare([tokens], 1)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        for start, stop in steps(len(tokens), N_BATCH, num_single):
            self._compute([Entry(tokens[at], at, 0, True) for at in range(start, stop)])
            first = llama_cpp.llama_get_logits(self._context)
            yield np.ctypeslib.as_array(first, (stop - start, self._vocab_size))

    def _decode(self, entries: Sequence[Entry]) -> list[tuple[int, int]]:
        """Compute a batch; return (sequence, likeliest next token) of rows that want logits."""
        self._compute(entries)
        return [
            (entry.sequence, self._likeliest(row))
            for row, entry in enumerate(entries)
            if entry.wants_logits
        ]

    def _compute(self, entries: Sequence[Entry]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for row, entry in enumerate(entries):
            batch.token[row] = entry.token
            batch.pos[row] = entry.position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = entry.sequence
            batch.logits[row] = entry.wants_logits
        if status := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")

    def _likeliest(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self._vocab_size,))))


def _rounded(length: int) -> int:
    return -(-length // CELLS_STEP) * CELLS_STEP


if __name__ == "__main__":
    serve(LlamaCpp)
