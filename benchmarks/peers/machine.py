"""The state of the machine, which every figure depends on."""

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

KERNELS_BENCHMARK: Final = Path(__file__).resolve().parents[1] / "kernels.py"
CEILINGS_TIMEOUT_S: Final = 180
FEATURES: Final = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
"""x86 names, then AArch64's."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a comparison ran."""

    processor: str
    cpus: tuple[int, ...]
    """The ones that the engines may run on."""
    cpu_count: int
    features: tuple[str, ...]
    memory_gb: float
    kernel: str
    load_average: float
    """Of the last minute, before the first run: much above 0, others were at work."""

    def as_dict(self) -> dict[str, Any]:
        """Return what a JSON file can hold."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.processor}, {len(self.cpus)} of {self.cpu_count} CPUs, "
            f"{self.memory_gb:.0f} GB, {self.kernel}\n"
            f"features: {' '.join(self.features) or 'none of interest'}\n"
            f"load average before: {self.load_average:.2f}"
        )


def describe_machine() -> Machine:
    """Look at the machine."""
    info = _cpu_info()
    flags = set(info.get("flags", info.get("Features", "")).split())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    family = ", ".join(
        f"{key} {info[key]}" for key in ("cpu family", "model", "stepping") if key in info
    )
    return Machine(
        processor=f"{info.get('model name', platform.machine())} ({family})",
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        cpu_count=os.cpu_count() or 1,
        features=tuple(name for name in FEATURES if name in flags),
        memory_gb=pages / 1e9,
        kernel=f"{platform.system()} {platform.release()}",
        load_average=os.getloadavg()[0],
    )


def measure_ceilings(threads: int) -> dict[str, Any] | None:
    """Ask the kernel benchmark for barrier time, read bandwidth and peaks.

    None where this version of Octavo has no such benchmark, or it has none for this machine.
    """
    if not KERNELS_BENCHMARK.exists():
        return None
    command = [sys.executable, str(KERNELS_BENCHMARK), "--ceilings", "--threads", str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CEILINGS_TIMEOUT_S)
        found = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return found if isinstance(found, dict) else None


def stolen_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Return the share of CPU time that the hypervisor gave to others between two readings."""
    total = after[1] - before[1]
    return (after[0] - before[0]) / total if total else 0.0


def cpu_times() -> tuple[int, int]:
    """Return stolen and total jiffies of all CPUs; zeros where the kernel does not say."""
    try:
        fields = [int(value) for value in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    except (OSError, ValueError):
        return 0, 0
    return (fields[7] if len(fields) > 7 else 0), sum(fields[:8])


def _cpu_info() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
