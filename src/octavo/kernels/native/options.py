"""How the native backend uses the machine: plain data, importable where it is not built."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

MIN_KEPT_BYTES: Final = 8 << 20
"""Models smaller than this are packed in no time."""


@dataclass(frozen=True, slots=True)
class PackedCache:
    """Where packed weights are kept on disk, and of which model."""

    folder: Path
    """Holds a folder for each model."""
    model: Path
    """The model's file or folder; what was kept of an older version of it is replaced."""
    version: str
    """Tells versions of the model apart."""
    min_bytes: int = MIN_KEPT_BYTES
    """Least bytes of weights that are kept."""


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """How the native backend uses the machine."""

    isa: str = "auto"
    """Instruction set whose kernels run: ``auto`` for the fastest this CPU has, else a name."""
    threads: int = 0
    """Threads of a step, 0 for as many as affinity and cgroup limits allow."""
    cpus: tuple[int, ...] = ()
    """CPUs that the threads of a step stay on, one each; the first is that of the thread that asks
    for a step. Empty: workers stay on CPUs that this process may use, and the asking one floats."""
    pin_threads: bool = True
    """Whether threads stay on a CPU each."""
    deterministic: bool = False
    """Whether a row's result keeps its last bit whatever else a step computes."""
    split_contexts: bool = True
    """Whether attention to a long context may be cut into parts for several threads. To compare."""
    share_prefixes: bool = True
    """Whether decodes that share blocks may read them together. To compare."""
    packed_cache: PackedCache | None = None
    """Where packed weights are kept for the next start; None: nowhere."""
