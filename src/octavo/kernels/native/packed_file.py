"""The file in which packed weights are kept: written once as a whole, read by mapping it.

The weights lie one behind the other, each at a page's start; then comes a table in JSON; then a
tail of fixed size with the table's length and digest. docs/adr/0004 says why.
"""

import contextlib
import hashlib
import json
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final

from octavo.kernels.native import _native

Checksums = Callable[[_native.MappedFile, int], list[int]]
"""Checksums of the pieces of a file's first bytes."""

_ALIGNMENT: Final = 4096
_MAGIC: Final = b"octavo-1"
_TAIL: Final = struct.Struct("<Q16s8s")
_TEMPORARY: Final = ".tmp-"
_STALE_S: Final = 3600.0


class DamagedFileError(Exception):
    """A file is not what was written; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Table:
    """What a file of packed weights says of itself."""

    identity: str
    """Of what model, by what build."""
    num_bytes: int
    """Bytes of weights, which the checksums cover."""
    places: Mapping[str, tuple[int, int]]
    """Offset and number of bytes of each weight."""
    checksums: list[int]

    def to_bytes(self) -> bytes:
        """Return the table with its tail."""
        table = json.dumps(asdict(self)).encode()
        return table + _TAIL.pack(len(table), _digest(table), _MAGIC)


def read_packed(
    path: Path, identity: str, checksums: Checksums
) -> tuple[_native.MappedFile, Table]:
    """Map the file and check all of it.

    Raises:
        FileNotFoundError: there is none, or it is of another model or build.
        DamagedFileError: it is not as it was written.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        table = _read_table(file)
        if table.identity != identity:
            raise FileNotFoundError
        mapped = _native.MappedFile(file.fileno())
        try:
            found = checksums(mapped, table.num_bytes)
        except ValueError:
            raise DamagedFileError("it is cut short") from None
        if found != table.checksums:
            raise DamagedFileError("its checksums are wrong")
    return mapped, table


def write_packed(
    path: Path, identity: str, weights: Mapping[str, _native.Weight], checksums: Checksums
) -> None:
    """Write the weights to a file of their own and put it in the place of ``path`` at once.

    Raises:
        OSError: it cannot be written; ``path`` is as it was.
    """
    _sweep(path.parent)
    with _replacing(path) as file:
        places: dict[str, tuple[int, int]] = {}
        for name, weight in weights.items():
            file.write(bytes(-file.tell() % _ALIGNMENT))
            places[name] = (file.tell(), weight.num_bytes)
            file.write(weight.panels.data)
        num_bytes = file.tell()
        file.flush()
        sums = checksums(_native.MappedFile(file.fileno()), num_bytes)
        file.write(Table(identity, num_bytes, places, sums).to_bytes())


def _read_table(file: IO[bytes]) -> Table:
    size = os.fstat(file.fileno()).st_size
    if size < _TAIL.size:
        raise DamagedFileError("it is cut short")
    file.seek(size - _TAIL.size)
    length, digest, magic = _TAIL.unpack(file.read(_TAIL.size))
    if magic != _MAGIC or length > size - _TAIL.size:
        raise DamagedFileError("it is cut short")
    file.seek(size - _TAIL.size - length)
    table = file.read(length)
    if _digest(table) != digest:
        raise DamagedFileError("its table is damaged")
    try:
        return Table(**json.loads(table))
    except TypeError:
        raise FileNotFoundError from None  # a build that knows other fields wrote it


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file that takes the place of ``path`` if the block ends well."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=_TEMPORARY)
    try:
        with open(descriptor, "w+b") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _sweep(folder: Path) -> None:
    """Remove what killed processes left half written."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()
