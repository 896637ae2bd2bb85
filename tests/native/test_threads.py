"""Threads of a step: how many, and on which CPUs they stay."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from octavo.cli.options import parse_cpus
from octavo.core.errors import SettingError
from octavo.kernels.native.options import NativeOptions
from support_models import decoder_driver, random_tensors, tiny_config
from support_native import extension, native

USABLE: list[int] = extension.usable_cpus()
needs_affinity = pytest.mark.skipif(not USABLE, reason="this system does not tell or choose CPUs")


def masks_after_a_step(options: NativeOptions) -> list[str]:
    """CPUs allowed to each thread that a backend started, and last those of the thread that ran a
    step, which is one of its own."""
    before = set(Path("/proc/self/task").iterdir())
    backend = native.NativeBackend("float32", options)
    workers = sorted(set(Path("/proc/self/task").iterdir()) - before)
    config = tiny_config()
    driver = decoder_driver(config, random_tensors(config), backend=backend)
    driver.add("a", [1, 2, 3])
    found: list[str] = []

    def step() -> None:
        driver.step(("a", 3))
        found.append(allowed(Path(f"/proc/self/task/{threading.get_native_id()}")))

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    return [*map(allowed, workers), *found]


def allowed(task: Path) -> str:
    status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
    return status["Cpus_allowed_list"]


@needs_affinity
def test_threads_stay_where_they_are_told() -> None:
    """The thread that asks for steps takes the first CPU of the list, workers the others in turn,
    and whoever packed the weights (the server's event loop, later) is left alone."""
    own = allowed(Path(f"/proc/self/task/{threading.get_native_id()}"))
    cpus = tuple(reversed(USABLE[:2]))
    masks = masks_after_a_step(NativeOptions(cpus=cpus))
    assert masks == [str(cpu) for cpu in (*cpus[1:], cpus[0])]
    assert allowed(Path(f"/proc/self/task/{threading.get_native_id()}")) == own


@needs_affinity
def test_unasked_the_thread_that_steps_moves_freely() -> None:
    """Only workers are pinned: a caller's thread is the caller's."""
    own = allowed(Path(f"/proc/self/task/{threading.get_native_id()}"))
    masks = masks_after_a_step(NativeOptions(threads=len(USABLE)))
    assert masks == [*map(str, USABLE[1:]), own]


@needs_affinity
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (NativeOptions(cpus=(max(USABLE, default=0) + 1,)), "but this process may use"),
        (NativeOptions(cpus=tuple(USABLE[:1]), threads=2), "names 1"),
        (NativeOptions(cpus=tuple(2 * USABLE[:1])), "names a CPU twice"),
        (NativeOptions(threads=-3), "between 0 and 4096, not -3"),
        (NativeOptions(threads=2**40), "between 0 and 4096"),
        (NativeOptions(threads=2.5), "a whole number"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_said(options: NativeOptions, sentence: str) -> None:
    """A CPU that this process may not use, one for two threads, fewer than threads, and no number
    of threads."""
    with pytest.raises(SettingError, match=sentence):
        native.NativeBackend("float32", options)


@pytest.mark.parametrize("text", ["0,0", "0-1,1", "0-2,1"])
def test_a_list_that_names_a_cpu_twice_is_refused(text: str) -> None:
    """Turns red if such a list, as the command line takes it, becomes some other one."""
    with pytest.raises(SettingError) as caught:
        native.NativeBackend("float32", NativeOptions(cpus=parse_cpus(text)))
    assert caught.value.name == "--cpu-affinity"


@needs_affinity
def test_a_list_of_cpus_sets_the_number_of_threads() -> None:
    """One thread a CPU, no matter how many there are besides."""
    assert native.NativeBackend("float32", NativeOptions(cpus=(USABLE[0],))).threads == 1
    assert native.NativeBackend("float32", NativeOptions()).threads == extension.usable_threads()


@pytest.mark.parametrize(
    ("memberships", "file", "text", "threads"),
    [
        pytest.param("0::/", "cpu.max", "250000 100000", 2, id="rounded down"),
        pytest.param("0::/", "cpu.max", "50000 100000", 1, id="at least one"),
        pytest.param("0::/", "cpu.max", "max 100000", None, id="no limit"),
        pytest.param("0::/", "cpu.max", "", None, id="nothing said"),
        pytest.param("0::/a/b", "a/cpu.max", "100000 100000", 1, id="of a group around it"),
        pytest.param("0::/a/b", "c/cpu.max", "100000 100000", None, id="of another group"),
        pytest.param("3:cpu,cpuacct:/a", "cpu/a/cpu.cfs_quota_us", "100000", 1, id="version 1"),
        pytest.param("3:cpu,cpuacct:/a", "cpu/a/cpu.cfs_quota_us", "-1", None, id="none there"),
        pytest.param("3:memory:/a", "cpu/a/cpu.cfs_quota_us", "100000", None, id="of memory"),
        pytest.param("3:cpuset:/a", "cpu/a/cpu.cfs_quota_us", "100000", None, id="of a set"),
    ],
)
def test_limits_of_containers(
    memberships: str, file: str, text: str, threads: int | None, tmp_path: Path
) -> None:
    """Turns red if a quota is read wrongly, or not where systemd and containers put it. None: as
    many threads as without."""
    limit = tmp_path / file
    limit.parent.mkdir(parents=True, exist_ok=True)
    limit.write_text(f"{text}\n")
    limit.with_name("cpu.cfs_period_us").write_text("100000\n")
    named = tmp_path / "memberships"
    named.write_text(f"{memberships}\n")
    free = extension.usable_threads(cgroups="", memberships="")
    wanted = free if threads is None else min(threads, free)
    assert extension.usable_threads(str(tmp_path), str(named)) == wanted


def output_of(script: str) -> str:
    """What a Python of its own prints, its threads and limits being no one else's."""
    head = (
        "import os, resource, signal\n"
        "from octavo.core.errors import SettingError\n"
        "from octavo.kernels.native.backend import NativeBackend\n"
        "from octavo.kernels.native.options import NativeOptions\n"
    )
    run = [sys.executable, "-c", head + script]
    return subprocess.run(run, check=True, capture_output=True, text=True, timeout=60).stdout


@needs_affinity
def test_more_threads_than_the_system_starts_are_an_error() -> None:
    """Turns red if a thread that cannot be started, here for want of room for its stack, ends the
    process instead of the start."""
    script = """
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    NativeBackend("float32", NativeOptions(threads=4000))
except SettingError as error:
    print(error.name, NativeBackend("float32", NativeOptions(threads=2)).threads)
"""
    assert output_of(script) == "--threads 2\n"


@pytest.mark.skipif(sys.platform == "win32", reason="nothing forks there")
def test_a_forked_process_is_told_to_load_its_own() -> None:
    """Turns red if a child waits forever for threads that stayed with its parent, in a step or when
    it lets go of the backend, or if the parent's are disturbed."""
    script = """
backend = NativeBackend("float32", NativeOptions(threads=2))
if os.fork() == 0:
    signal.alarm(30)
    try:
        backend.machine.read_gb_per_s(1 << 20)
    except RuntimeError as error:
        print(str(error).split(";")[1], flush=True)
    del backend
    another = NativeBackend("float32", NativeOptions(threads=2))
    os._exit(another.machine.read_gb_per_s(1 << 20) <= 0)
print(os.wait()[1], backend.machine.read_gb_per_s(1 << 20) > 0)
"""
    assert output_of(script) == " load the model after the fork.\n0 True\n"
