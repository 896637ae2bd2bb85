"""A Hugging Face style folder, of which only files inside it are ever read."""

import json
import os
from pathlib import Path
from typing import Final

from octavo.core.errors import LoadError

MAX_JSON_BYTES: Final = 1 << 26


class ModelFolder:
    """A folder and its files by plain name.

    A file may be a symbolic link to another place inside the folder. In the Hugging Face cache,
    where a folder is ``REPOSITORY/snapshots/REVISION``, it may also lead into
    ``REPOSITORY/blobs``, which is how that cache shares files between revisions. Every other link
    is refused, and so is a name with a path in it: a downloaded model must not make a server read
    what lies elsewhere on its disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._real = path.resolve()
        self._roots = [self._real]
        if self._real.parent.name == "snapshots":
            self._roots.append(self._real.parent.parent / "blobs")

    def names(self) -> list[str]:
        """Return the names of the files and folders inside, sorted."""
        try:
            return sorted(entry.name for entry in self.path.iterdir())
        except OSError as error:
            raise LoadError(f"{self.path} cannot be read: {error.strerror or error}.") from None

    def has(self, name: str) -> bool:
        """Whether there is a file of this plain name."""
        return os.path.isfile(self.path / name)

    def file(self, name: str) -> Path:
        """Return the path of the file called ``name``.

        Raises:
            LoadError: ``name`` is not a plain name, or the file is a link that leads out.
        """
        if not name or name in (".", "..") or any(char in name for char in "/\\:\0"):
            raise LoadError(
                f"{self.path}: {name!r:.200} is not the plain name of a file inside the folder."
            )
        path = self.path / name
        try:
            target = path.resolve()
        except (OSError, RuntimeError):  # a circle of links
            raise LoadError(f"{path} is a link that leads nowhere.") from None
        if not any(target.is_relative_to(root) for root in self._roots):
            raise LoadError(f"{path} is a link that leads out of the model's folder.")
        return path

    def read_json(self, name: str) -> dict[str, object]:
        """Return the object in a JSON file.

        Raises:
            LoadError: the file is missing, too large, or not a JSON object.
        """
        path = self.file(name)
        try:
            if path.stat().st_size > MAX_JSON_BYTES:
                raise LoadError(f"{path} is larger than {MAX_JSON_BYTES} bytes.")
            return parse_json_object(path.read_bytes(), str(path))
        except OSError as error:
            raise LoadError(f"{path} cannot be read: {error.strerror or error}.") from None


def parse_json_object(data: bytes, where: str) -> dict[str, object]:
    """Return the JSON object in ``data``; a key that occurs twice is an error.

    Raises:
        LoadError: ``data`` is anything else; the message starts with ``where``.
    """
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise LoadError(f"{where} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise LoadError(f"{where} must hold a JSON object.")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in values if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.100} occurs twice")
    return values
