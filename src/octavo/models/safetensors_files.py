"""Reads safetensors files by memory map: one file, or the shards that an index names.

The format is a length, a JSON header (name to dtype, shape, begin and end), then the data. The
header is read here and not with the safetensors package, whose numpy interface copies every tensor
and knows no bfloat16; its rules (offsets in order, no gap, no overlap, no rest) are kept. No other
format is read: pickled weights (``.bin``, ``.pt``) can run code when they are opened.
"""

import logging
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from octavo.core.errors import LoadError
from octavo.kernels.weights import Encoding, WeightTensor
from octavo.models.mapped_file import map_file
from octavo.models.model_folder import ModelFolder, parse_json_object
from octavo.models.tensor_layout import listing

logger = logging.getLogger(__name__)

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
MAX_HEADER_BYTES: Final = 1 << 24
MAX_DIMENSIONS: Final = 8
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt")

_LENGTH: Final = struct.Struct("<Q")
_ENCODINGS: Final = MappingProxyType(
    {"F32": Encoding.F32, "F16": Encoding.F16, "BF16": Encoding.BF16}
)
_OTHER_SIZES: Final = MappingProxyType(
    {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2}
    | {"I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8}
)
"""Dtypes that are read past, and refused only for a tensor that is needed -> bytes a value."""


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile(Mapping[str, WeightTensor]):
    """The tensors of one file, as views of the mapped file."""

    def __init__(self, path: Path) -> None:
        """Map ``path`` and check its header.

        Raises:
            LoadError: the file cannot be read, or is corrupt.
        """
        self._path = path
        self._data: mmap.mmap = map_file(path, kind="safetensors")
        self._entries, self._start = _read_header(path, self._data)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> WeightTensor:
        """Return a tensor.

        Raises:
            LoadError: its dtype is not supported, or it has no values.
        """
        entry = self._entries[name]
        encoding = _ENCODINGS.get(entry.dtype)
        if encoding is None:
            supported = ", ".join(_ENCODINGS)
            raise LoadError(
                f"{self._path}: the tensor {name} has the dtype {entry.dtype}; supported are "
                f"{supported}."
            )
        size = entry.end - entry.begin
        if not entry.shape or size == 0:
            raise LoadError(
                f"{self._path}: the tensor {name} has the unusable shape {entry.shape}."
            )
        data = np.frombuffer(self._data, np.uint8, size, self._start + entry.begin)
        row_bytes = encoding.row_bytes(entry.shape[-1])
        return WeightTensor(name, encoding, entry.shape, data.reshape(-1, row_bytes))


def open_folder_weights(folder: ModelFolder) -> Mapping[str, WeightTensor]:
    """Open the weights of ``folder``: what its index names, else ``model.safetensors``.

    Other weight files are left alone, with a warning.

    Raises:
        LoadError: there are no safetensors, a file or tensor of the index is missing, a file has
            tensors the index lacks, or a file is corrupt.
    """
    if folder.has(INDEX_NAME):
        weights, used = _open_shards(folder)
    elif folder.has(SINGLE_NAME):
        weights, used = SafetensorsFile(folder.file(SINGLE_NAME)), {SINGLE_NAME}
    else:
        raise LoadError(_why_no_weights(folder))
    suffixes = (".safetensors", ".gguf", *PICKLE_SUFFIXES)
    stray = [name for name in folder.names() if name.endswith(suffixes) and name not in used]
    if stray:
        logger.warning("%s: ignoring %s", folder.path, listing(stray, "other weight file"))
    return weights


def _open_shards(folder: ModelFolder) -> tuple[Mapping[str, WeightTensor], set[str]]:
    weight_map = _read_index(folder)
    names = sorted(set(weight_map.values()))
    paths = {name: folder.file(name) for name in names}  # refuses names that lead out
    missing = [name for name in names if not folder.has(name)]
    index = folder.path / INDEX_NAME
    if missing:
        raise LoadError(
            f"{index} names {listing(missing, 'file')} that the folder lacks; download the model "
            "again, or remove the index if it is out of date."
        )
    shards = {name: SafetensorsFile(path) for name, path in paths.items()}
    absent = [tensor for tensor, name in weight_map.items() if tensor not in shards[name]]
    if absent:
        raise LoadError(f"{index} names {listing(absent, 'tensor')} that its files lack.")
    extra = [tensor for name in names for tensor in shards[name] if weight_map.get(tensor) != name]
    if extra:
        raise LoadError(f"{index} does not name {listing(extra, 'tensor')} that its files have.")
    return _Shards(weight_map, shards), set(names)


class _Shards(Mapping[str, WeightTensor]):
    def __init__(
        self, weight_map: Mapping[str, str], shards: Mapping[str, SafetensorsFile]
    ) -> None:
        self._weight_map = weight_map
        self._shards = shards

    def __iter__(self) -> Iterator[str]:
        return iter(self._weight_map)

    def __len__(self) -> int:
        return len(self._weight_map)

    def __getitem__(self, name: str) -> WeightTensor:
        return self._shards[self._weight_map[name]][name]


def _read_index(folder: ModelFolder) -> dict[str, str]:
    weight_map = folder.read_json(INDEX_NAME).get("weight_map")
    where = folder.path / INDEX_NAME
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{where}: weight_map must name at least one tensor.")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise LoadError(
                f"{where}: the file of {tensor!r:.100} must be a .safetensors file, not "
                f"{name!r:.100}."
            )
    return weight_map


def _why_no_weights(folder: ModelFolder) -> str:
    names = folder.names()
    if pickles := [name for name in names if name.endswith(PICKLE_SUFFIXES)]:
        return (
            f"{folder.path} has no {SINGLE_NAME}, only pickled weights ({pickles[0]}), which can "
            "run code when they are opened; convert them to safetensors."
        )
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return f"{folder.path} has no {SINGLE_NAME}; to serve {ggufs[0]}, name that file itself."
    return f"{folder.path} has neither {SINGLE_NAME} nor {INDEX_NAME}."


def _read_header(path: Path, data: mmap.mmap) -> tuple[dict[str, _Entry], int]:
    """Return the entries of a file and where its data starts."""
    size = len(data)
    length = _LENGTH.unpack_from(data)[0] if size >= _LENGTH.size else size
    start = _LENGTH.size + length
    if start > size or length > MAX_HEADER_BYTES:
        raise LoadError(
            f"{path} is truncated or not a safetensors file: its header would have {length} bytes."
        )
    header = parse_json_object(data[_LENGTH.size : start], f"The header of {path}")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value) for name, value in header.items()}
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            problem = "overlaps another" if entry.begin < position else "leaves a gap before it"
            raise LoadError(f"{path} is corrupt: the tensor {name!r:.100} {problem}.")
        position = entry.end
    if start + position != size:
        raise LoadError(
            f"{path} is truncated or corrupt: its tensors need {start + position} bytes, but the "
            f"file has {size}."
        )
    return entries, start


def _entry(path: Path, name: str, value: object) -> _Entry:
    what = f"{path} is corrupt: the tensor {name!r:.100}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise LoadError(f"{what} must have dtype, shape and data_offsets.")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not (_naturals(shape) and len(shape) <= MAX_DIMENSIONS):
        raise LoadError(f"{what} has the impossible shape {shape!r:.100}.")
    if not (_naturals(offsets) and len(offsets) == 2):
        raise LoadError(f"{what} has the impossible data_offsets {offsets!r:.100}.")
    if not isinstance(dtype, str):
        raise LoadError(f"{what} has the impossible dtype {dtype!r:.100}.")
    encoding = _ENCODINGS.get(dtype)
    width = encoding.block_bytes if encoding else _OTHER_SIZES.get(dtype)
    if width is None:
        raise LoadError(f"{path}: the tensor {name!r:.100} has the unknown dtype {dtype!r:.100}.")
    if offsets[1] - offsets[0] != prod(shape) * width:
        raise LoadError(f"{what} has data_offsets that do not match its shape.")
    return _Entry(dtype, tuple(shape), offsets[0], offsets[1])


def _naturals(value: object) -> bool:
    """Whether ``value`` is a list of whole numbers, none below 0."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
