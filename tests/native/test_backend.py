"""The backend's border: settings, checks of what it is given, and the recorded line."""

import threading

import numpy as np
import pytest

from octavo.core.errors import InvariantError, SettingError
from octavo.kernels.native.fusion import fuse
from octavo.kernels.native.graph import Linear, Node, Norm, Recorder
from octavo.kernels.native.options import NativeOptions
from octavo.models.decoder import build_decoder
from support_models import decoder_driver, random_tensors, tiny_config
from support_native import ISAS, backend_of, make_batch, native


def recorded(**changes: object) -> list[Node]:
    """The calls of a small decoder."""
    config = tiny_config(**changes)
    decoder = build_decoder(config, random_tensors(config), backend_of(ISAS[-1]))
    recorder = Recorder()
    decoder.forward(recorder)
    return recorder.nodes


def test_layers_fuse_to_six_operations() -> None:
    """A llama layer is qkv, rope, attention, output, gate/up and down; norms, residuals and gates
    ride along. The last one's products see only the rows whose logits are wanted. Red if a change
    of the decoder's line defeats a fusion unnoticed."""
    kinds = [type(node).__name__ for node in fuse(recorded())]
    layer = ["Linear", "RopeAndStore", "Attend", "Linear", "Linear", "Linear"]
    last = [
        "Linear",
        "RopeAndStore",
        "Attend",
        "TakeRows",
        "TakeRows",
        "Linear",
        "Linear",
        "Linear",
    ]
    assert kinds == ["Embed", *layer, *last, "Linear"]


def test_a_value_with_two_readers_is_kept() -> None:
    """Gemma's norms behind a block stay on their own, since the residual reads their result."""
    nodes = fuse(
        recorded(architecture="gemma3", norm_offset=1.0, sliding_window=9, tied_embeddings=True)
    )
    assert sum(isinstance(node, Norm) for node in nodes) == 4
    assert all(node.residual is None for node in nodes if isinstance(node, Linear))


def test_unknown_instruction_set_is_refused() -> None:
    """One sentence that names what there is."""
    with pytest.raises(SettingError, match="portable"):
        native.NativeBackend("float32", NativeOptions(isa="mmx"))


def test_compile_before_allocation_is_a_bug() -> None:
    """The order of calls is part of the protocol."""
    config = tiny_config()
    backend = backend_of(ISAS[0])
    decoder = build_decoder(config, random_tensors(config), backend)
    with pytest.raises(InvariantError, match="allocate_kv"):
        backend.compile(decoder.forward)


@pytest.mark.parametrize(
    ("field", "index", "value"),
    [
        ("token_ids", 3, 61),
        ("token_ids", 0, -1),
        ("block_tables", (0, 0), 128),
        ("block_tables", (1, 0), -5),
        ("logits_rows", 0, 8),
        ("cu_query_lens", 1, 9),
        ("cu_query_lens", 2, 7),
        ("kv_lens", 0, 1000),
        ("kv_lens", 0, 2),
    ],
)
def test_indices_outside_are_a_bug_not_a_crash(field: str, index: object, value: int) -> None:
    """A batch that points outside the cache, the table or itself never reaches the kernels."""
    config = tiny_config()
    backend = backend_of(ISAS[0])
    decoder = build_decoder(config, random_tensors(config), backend)
    backend.allocate_kv(decoder.kv_spec(16, "float32"), 128)
    step = backend.compile(decoder.forward)
    batch = make_batch([5, 3], [0, 0])
    step(batch)
    getattr(batch, field)[index] = value
    with pytest.raises(InvariantError):
        step(batch)


def test_copy_outside_is_a_bug() -> None:
    """A block id past the cache is refused, not copied."""
    backend = backend_of(ISAS[0])
    config = tiny_config()
    backend.allocate_kv(
        build_decoder(config, random_tensors(config), backend).kv_spec(4, "float32"), 4
    )
    with pytest.raises(ValueError, match="block id"):
        backend._native.copy_block(0, 4)


def test_backends_do_not_disturb_each_other() -> None:
    """Two engines in two threads, each with its own pool, give what each gives alone."""
    config = tiny_config()
    tensors = random_tensors(config)
    prompt = list(range(50))

    def run(results: list[np.ndarray]) -> None:
        driver = decoder_driver(config, tensors, backend=backend_of(ISAS[0]))
        for turn in range(20):
            driver.add(str(turn), prompt)
            results.append(driver.step((str(turn), 50))[0])
            driver.release(str(turn))

    results: list[list[np.ndarray]] = [[], []]
    threads = [threading.Thread(target=run, args=(part,)) for part in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for logits in results[0] + results[1]:
        np.testing.assert_array_equal(logits, results[0][0])
