"""Packed weights kept on disk, so that a model's next start maps them instead of packing."""

import contextlib
import hashlib
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.native import _native
from octavo.kernels.native.options import PackedCache
from octavo.kernels.native.packed_file import DamagedFileError, read_packed, write_packed

logger = logging.getLogger(__name__)

_MODEL_NAME: Final = "model.txt"


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A packed weight, as a store knows it."""

    source: str
    """Which tensors it is made of, and a sample of what they hold."""
    outputs: int
    inputs: int
    format: int
    gated: bool

    @property
    def name(self) -> str:
        """What it is made of and how it is packed."""
        kind = "gated" if self.gated else "plain"
        return f"{self.source} {self.outputs}x{self.inputs} {kind} format {self.format}"


class PackedStore:
    """The packed weights of one model, for one instruction set and one choice of formats.

    Nothing that goes wrong with the file is an error: weights are packed then, and one warning says
    why. Several processes may use a store at once: files are replaced whole, never changed.
    """

    def __init__(self, cache: PackedCache, backend: _native.Backend, precision: str) -> None:
        model = cache.model.resolve()
        digest = hashlib.sha256(str(model).encode()).hexdigest()[:12]
        self.path = cache.folder / f"{model.stem}-{digest}" / f"{backend.isa}-{precision}.weights"
        """The store's file, there or not."""
        self._model = model
        self._min_bytes = cache.min_bytes
        self._backend = backend
        self._identity = f"{_native.packed_layout()} {cache.version}"
        self._weights: dict[str, _native.Weight] = {}
        self._has_new = False
        self._is_readable = True
        self._places: Mapping[str, tuple[int, int]] = {}
        self._file = self._open()

    def find(self, spec: WeightSpec, bias: NDArray[np.float32] | None) -> _native.Weight | None:
        """Return the weight as it was kept, or None if it must be packed."""
        place = self._places.get(spec.name)
        if self._file is None or place is None:
            return None
        try:
            weight = self._backend.map(
                self._file, place[0], spec.outputs, spec.inputs, spec.format, spec.gated, bias
            )
        except ValueError:  # whoever wrote this table had other sizes in mind
            return None
        self._weights[spec.name] = weight
        return weight

    def add(self, spec: WeightSpec, weight: _native.Weight) -> None:
        """Take in a weight that was packed, to be kept by ``save``."""
        self._weights[spec.name] = weight
        self._has_new = True

    def save(self) -> None:
        """Keep all weights seen so far, if any of them is new and they are worth keeping."""
        is_worth_it = sum(w.num_bytes for w in self._weights.values()) >= self._min_bytes
        if not (self._has_new and self._is_readable and is_worth_it):
            return
        self._has_new = False
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _MODEL_NAME).write_text(f"{self._model}\n")
            _forget_lost_models(folder.parent)
            write_packed(self.path, self._identity, self._weights, self._backend.checksums)
        except OSError as error:
            logger.warning(
                "Could not keep packed weights in %s (%s); the next start packs them again.",
                folder,
                error.strerror or error,
            )

    def _open(self) -> _native.MappedFile | None:
        try:
            file, table = read_packed(self.path, self._identity, self._backend.checksums)
        except FileNotFoundError:
            return None
        except (DamagedFileError, OSError) as error:
            self._is_readable = isinstance(error, DamagedFileError)
            reason = getattr(error, "strerror", None) or error
            logger.warning("Not using %s (%s); packing the weights again.", self.path, reason)
            return None
        self._places = table.places
        return file


def _forget_lost_models(folder: Path) -> None:
    """Remove what is kept of models that are no longer where they were."""
    for note in folder.glob(f"*/{_MODEL_NAME}"):
        with contextlib.suppress(OSError):
            if not Path(note.read_text().rstrip("\n")).exists():
                shutil.rmtree(note.parent)
