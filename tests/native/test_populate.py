"""KV memory that is touched ahead of its use, while no step runs."""

import gc
import os
import signal
import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest

from octavo.kernels.numpy_backend import NumpyBackend
from support import PATIENCE_S
from support_attention import Shape, attention_line
from support_native import ISAS, backend_of, extension, make_batch, run_line

MIB = 1 << 20
SHAPE = Shape(kv_heads=8, dim=64)
BLOCK = SHAPE.spec.block_bytes
SLACK = 6 * MIB
"""What a process takes for other things meanwhile, and whole huge pages at both ends."""


@pytest.fixture(autouse=True)
def nothing_to_collect() -> None:
    """What earlier tests left must not go meanwhile."""
    gc.collect()


def resident() -> int:
    """Bytes of this process that are in memory."""
    return psutil.Process().memory_info().rss


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def threads() -> int:
    """Threads of this process."""
    return psutil.Process().num_threads()


def pool(num_bytes: int) -> "extension.Backend":
    """A backend with KV of about so many bytes, in blocks of ``BLOCK``."""
    backend = extension.Backend(ISAS[0], 1, [], pin_caller=False)
    spec = SHAPE.spec
    backend.allocate_kv(1, spec.num_kv_heads, spec.head_dim, spec.block_size, num_bytes // BLOCK, 0)
    return backend


def test_a_lead_is_resident_and_moves_with_what_is_used() -> None:
    """Turns red when memory ahead is left untouched, when more of it is taken than the lead, or
    when a block used further on does not wake whoever touches it."""
    before = resident()
    backend = pool(128 * MIB)
    backend.populate_kv(32 * MIB)
    wait_until(lambda: resident() - before > 32 * MIB - SLACK)
    backend.copy_block(0, 64 * MIB // BLOCK)
    wait_until(lambda: resident() - before > 64 * MIB - SLACK)
    if resident() - before < 128 * MIB:  # AddressSanitizer's memory is all there from the start
        assert resident() - before < 64 * MIB + SLACK


def test_a_pool_smaller_than_the_lead() -> None:
    """Turns red when touching goes on past the end of the pool, or stops short of it."""
    before = resident()
    backend = pool(24 * MIB)
    backend.populate_kv(1 << 40)
    wait_until(lambda: resident() - before > 24 * MIB - SLACK)
    backend.copy_block(0, 24 * MIB // BLOCK - 1)
    backend.copy_block(24 * MIB // BLOCK - 1, 0)


def test_a_tiny_pool_has_no_thread() -> None:
    """Turns red when engines that hardly hold anything pay for a thread."""
    backend = pool(MIB)
    before = threads()
    backend.populate_kv(MIB)
    assert threads() == before


def test_it_ends_in_the_midst() -> None:
    """Turns red when whoever drops a backend waits until all is populated, or for ever."""
    before, empty = threads(), resident()
    backend = pool(512 * MIB)
    backend.populate_kv(512 * MIB)
    assert threads() == before + 1
    wait_until(lambda: resident() > empty + 4 * MIB)
    del backend
    assert threads() == before


def test_what_steps_wrote_stays() -> None:
    """Turns red when touching a page changes what a step stores there, before or meanwhile: steps
    begin while pages behind theirs are touched, and later ones read all that they wrote."""
    chunks, num_blocks = 16, 64 * MIB // BLOCK
    batches = []
    for chunk in range(chunks):
        batch = make_batch([SHAPE.block_size], [chunk * SHAPE.block_size], seed=chunk)
        batch.block_tables[:] = np.arange(chunk + 1) * (num_blocks // chunks)
        batches.append(batch)
    line = attention_line(SHAPE)
    wanted = run_line(NumpyBackend(), line, batches, SHAPE.spec, num_blocks)
    empty = resident()
    backend = backend_of(ISAS[0])
    backend.allocate_kv(SHAPE.spec, num_blocks)
    step = backend.compile(line(backend))
    for chunk, (batch, right) in enumerate(zip(batches, wanted, strict=True)):
        least = empty + min(chunk * 64 * MIB // chunks + 2 * MIB, 64 * MIB) - SLACK
        wait_until(lambda least=least: resident() >= least)
        np.testing.assert_allclose(step(batch), right, rtol=0, atol=2e-5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks there")
def test_a_forked_process_lets_go() -> None:
    """Turns red if a child waits for the thread that stayed with its parent, when it uses blocks
    or drops the backend."""
    backend = pool(32 * MIB)
    backend.populate_kv(32 * MIB)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        backend.copy_block(0, 5)
        del backend
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
