"""How much memory this process may use."""

import os
from pathlib import Path

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def available_memory_bytes() -> int:
    """Return free memory of the machine, or of the container if that is less."""
    page = os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):  # also counts page cache that can be dropped
            free = int(line.split()[1]) * 1024
    for path in _CGROUP_LIMITS:
        limit = _read(path).strip()
        if limit.isdigit():
            free = min(free, int(limit))
    return free


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
