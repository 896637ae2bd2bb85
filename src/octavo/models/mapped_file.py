"""Maps a file into memory for reading."""

import mmap
import stat
from pathlib import Path

from octavo.core.errors import LoadError


def map_file(path: Path, *, kind: str) -> mmap.mmap:
    """Map the whole of ``path``; ``kind`` says what it should be, such as ``GGUF``.

    Raises:
        LoadError: the file is missing, empty, not a regular file, or cannot be read.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # before opening, which would wait on a pipe
            raise LoadError(f"{path} is not a regular file.")
        if status.st_size == 0:
            raise LoadError(f"{path} is empty; a {kind} file was expected.")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise LoadError(f"{path} does not exist.") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:  # a path that no system has, or a file emptied meanwhile
        raise LoadError(f"{str(path)!r} cannot be read: {error}.") from None
