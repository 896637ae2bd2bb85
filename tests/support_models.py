"""What tests of kernels and decoders share: weights from arrays, and a small paged driver."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.batch import StepBatch
from octavo.kernels.numpy_backend import NumpyBackend
from octavo.kernels.ops import Backend, Forward, KVDtype, KVSpec
from octavo.kernels.weights import Encoding, WeightTensor
from octavo.models.config import DecoderConfig, RopeConfig
from octavo.models.decoder import build_decoder
from octavo.models.tensor_layout import decoder_layout

Float32 = NDArray[np.float32]
NO_BLOCK = np.iinfo(np.int32).max


def f32_tensor(values: NDArray[np.floating], name: str = "t") -> WeightTensor:
    """Store an array as a file would, in F32."""
    values = np.ascontiguousarray(values, np.float32)
    rows = values.reshape(-1, values.shape[-1])
    return WeightTensor(name, Encoding.F32, values.shape, rows.view(np.uint8))


def tiny_config(**changes: object) -> DecoderConfig:
    """A llama of two layers; ``changes`` replace fields."""
    fields: dict[str, object] = {
        "architecture": "llama",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "max_position": 512,
        "norm_eps": 1e-5,
        "rope": RopeConfig(10000.0, 12),
        "attention_scale": 12**-0.5,
        "tied_embeddings": False,
    }
    return DecoderConfig(**(fields | changes))  # type: ignore[arg-type]


def random_tensors(
    config: DecoderConfig, seed: int = 0, biased: Sequence[str] = ()
) -> dict[str, WeightTensor]:
    """Weights of every tensor in the decoder's layout, of a size that keeps logits near 1."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in decoder_layout(config, biased).shapes.items():
        values = rng.standard_normal(shape) * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)
        offset = 1.0 - config.norm_offset if name.endswith("norm.weight") else 0.0
        tensors[name] = f32_tensor(values + offset, name)
    return tensors


class PagedDriver:
    """Runs a line of calls over sequences whose blocks lie in shuffled order.

    It does by itself what the scheduler, the KV cache and the runner do in the server, as plainly
    as can be, and asks for the logits of every token.
    """

    def __init__(
        self,
        backend: Backend,
        forward: Forward,
        spec: KVSpec,
        *,
        num_blocks: int = 128,
        seed: int = 0,
    ) -> None:
        backend.allocate_kv(spec, num_blocks)
        self._step = backend.compile(forward)
        self.block_size = spec.block_size
        self._free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self._tokens: dict[str, list[int]] = {}
        self._done: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}

    def add(self, name: str, tokens: Sequence[int]) -> None:
        """Add a sequence with nothing computed."""
        self._tokens[name], self._done[name], self.tables[name] = list(tokens), 0, []

    def share(self, name: str, tokens: Sequence[int], source: str, num_blocks: int) -> None:
        """Add a sequence whose first full blocks are those of ``source``."""
        self.add(name, tokens)
        self.tables[name] = self.tables[source][:num_blocks]
        self._done[name] = num_blocks * self.block_size

    def adopt(self, name: str, block: int, *, num_tokens: int) -> None:
        """Append a block to a sequence's table, so that ``num_tokens`` of it are computed."""
        self.tables[name].append(block)
        self._done[name] = num_tokens

    def take_blocks(self, count: int) -> list[int]:
        """Take free blocks that no sequence of the driver holds."""
        return [self._free.pop() for _ in range(count)]

    def release(self, name: str) -> None:
        """Give the blocks of a sequence back; the next sequence gets them first."""
        self._free.extend(self.tables.pop(name))
        del self._tokens[name], self._done[name]

    def step(self, *work: tuple[str, int]) -> list[Float32]:
        """Compute the next n tokens of each ``(name, n)``; return the logits of each."""
        logits = self._step(self.batch(*work))
        ends = np.cumsum([count for _, count in work])
        return [part.copy() for part in np.split(logits, ends[:-1])]

    def batch(self, *work: tuple[str, int], all_logits: bool = True) -> StepBatch:
        """Plan a step as ``step`` does, and count its tokens as computed."""
        token_ids: list[int] = []
        for name, count in work:
            start, end = self._done[name], self._done[name] + count
            assert end <= len(self._tokens[name])
            table = self.tables[name]
            while len(table) * self.block_size < end:
                table.append(self._free.pop())
            token_ids += self._tokens[name][start:end]
            self._done[name] = end
        width = max(len(self.tables[name]) for name, _ in work)
        meaningless = [NO_BLOCK] * width  # whoever reads past a sequence's blocks must fail
        tables = [(self.tables[name] + meaningless)[:width] for name, _ in work]
        ends_at = np.cumsum([0] + [count for _, count in work])
        rows = np.arange(len(token_ids)) if all_logits else ends_at[1:] - 1
        return StepBatch(
            token_ids=np.array(token_ids, np.int32),
            cu_query_lens=ends_at.astype(np.int32),
            kv_lens=np.array([self._done[name] for name, _ in work], np.int32),
            block_tables=np.array(tables, np.int32),
            logits_rows=rows.astype(np.int32),
        )


def decoder_driver(
    config: DecoderConfig,
    tensors: Mapping[str, WeightTensor],
    *,
    block_size: int = 16,
    num_blocks: int = 128,
    backend: Backend | None = None,
    kv_dtype: KVDtype = "float32",
) -> PagedDriver:
    """Build a decoder and put it under a driver."""
    backend = backend or NumpyBackend()
    decoder = build_decoder(config, tensors, backend)
    spec = decoder.kv_spec(block_size, kv_dtype)
    return PagedDriver(backend, decoder.forward, spec, num_blocks=num_blocks)


def alone(driver: PagedDriver, tokens: Sequence[int]) -> Float32:
    """Return the logits of all tokens of a sequence computed by itself in one step."""
    driver.add("alone", tokens)
    (logits,) = driver.step(("alone", len(tokens)))
    driver.release("alone")
    return logits
