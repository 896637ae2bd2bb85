"""Reads GGUF files (versions 2 and 3) by memory map and trusts nothing in them.

Layout: magic, version, counts, metadata (key, type, value), tensor table (name, dimensions, type,
offset), padding, tensor data; see the GGUF specification of the ggml project. Every count, length,
product and offset is compared with what is left of the file before anything is made of it, so a
corrupt file costs neither memory nor time. docs/adr/0002 says why this reader exists.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import LoadError
from octavo.kernels.weights import Encoding, WeightTensor
from octavo.models.mapped_file import map_file

MetadataValue = str | int | float | bool | list[str] | NDArray[Any]
"""Arrays of numbers are read-only views of the file."""

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_DIMENSIONS: Final = 4
MAX_ENTRIES: Final = 1 << 14
"""Most metadata keys, and most tensors."""
MAX_NAME_BYTES: Final = 1 << 16
MAX_STRING_BYTES: Final = 1 << 24
MAX_STRINGS: Final = 1 << 20
"""Most strings in all arrays together; the largest vocabularies have 0.7 million with merges."""

_MIN_KEY_BYTES: Final = 8 + 4 + 1
_MIN_TENSOR_BYTES: Final = 8 + 4 + 8 + 4 + 8
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9
_NUMBERS: Final = MappingProxyType(
    {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4"}
    | {_BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8"}
)
"""Value type -> numpy type."""

_ENCODINGS: Final = MappingProxyType(
    {
        0: Encoding.F32,
        1: Encoding.F16,
        2: Encoding.Q4_0,
        3: Encoding.Q4_1,
        6: Encoding.Q5_0,
        7: Encoding.Q5_1,
        8: Encoding.Q8_0,
        12: Encoding.Q4_K,
        13: Encoding.Q5_K,
        14: Encoding.Q6_K,
        30: Encoding.BF16,
    }
)
_OTHER_TYPES: Final = MappingProxyType(
    {9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS"}
    | {19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16"}
    | {26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}
)
"""Types that ggml knows and Octavo does not, for the error message."""


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF file whose header was read and checked; tensors are views of the mapped file."""

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, WeightTensor]


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    offset: int
    num_bytes: int


def read_gguf(path: Path) -> GGUFFile:
    """Open ``path`` and check its whole header.

    Raises:
        LoadError: the file cannot be read, is corrupt, or uses what Octavo does not support.
    """
    header = _Header(path, map_file(path, kind="GGUF"))
    num_tensors, num_keys = header.read_counts()
    metadata = header.read_metadata(num_keys)
    parts = metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts > 1:
        header.fail(
            f"it is one of {parts!r:.100} parts (split.count); merge them into one file with "
            "llama-gguf-split --merge"
        )
    infos = [header.read_tensor_info() for _ in range(num_tensors)]
    tensors = header.map_tensors(infos, _alignment(header, metadata))
    return GGUFFile(path, MappingProxyType(metadata), MappingProxyType(tensors))


class _Header:
    """A position in the mapped file; each read is checked against the file's end first."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._position = 0
        self._num_strings = 0

    def fail(self, reason: str) -> NoReturn:
        """Raise the error of this file."""
        raise LoadError(f"{self._path} cannot be loaded as a GGUF file: {reason}.")

    def read_counts(self) -> tuple[int, int]:
        """Read the fixed start of the file; return the numbers of tensors and of keys."""
        if self._data[:4] != MAGIC:
            self.fail("it does not start with the letters GGUF")
        self._position = 4
        version = self._unpack(_U32, "its version")
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
                self.fail("it is big-endian; only little-endian files are supported")
            self.fail(f"its version is {version}; versions 2 and 3 are supported")
        num_tensors = self._unpack(_U64, "its number of tensors")
        num_keys = self._unpack(_U64, "its number of metadata keys")
        self._check_entries(num_keys, _MIN_KEY_BYTES, "metadata keys")
        self._check_entries(num_tensors, _MIN_TENSOR_BYTES, "tensors")
        return num_tensors, num_keys

    def read_metadata(self, num_keys: int) -> dict[str, MetadataValue]:
        """Read all keys and values."""
        metadata: dict[str, MetadataValue] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key", MAX_NAME_BYTES)
            if key in metadata:
                self.fail(f"the metadata key {key!r:.100} occurs twice")
            value_type = self._unpack(_U32, "a value's type")
            metadata[key] = self._value(value_type, f"the value of {key!r:.100}")
        return metadata

    def read_tensor_info(self) -> _TensorInfo:
        """Read one row of the tensor table; its offset is still relative to the data's start."""
        name = self._string("a tensor's name", MAX_NAME_BYTES)
        what = f"the tensor {name!r:.100}"
        num_dimensions = self._unpack(_U32, what)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self.fail(f"{what} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible")
        dimensions = [self._unpack(_U64, what) for _ in range(num_dimensions)]
        if 0 in dimensions:
            self.fail(f"{what} has a dimension of 0")
        encoding = self._encoding(self._unpack(_U32, what), what)
        offset = self._unpack(_U64, what)
        if dimensions[0] % encoding.block_len:
            self.fail(
                f"{what} has rows of {dimensions[0]} values, which is not a multiple of the "
                f"{encoding.block_len} of a {encoding.label} block"
            )
        shape = tuple(reversed(dimensions))
        num_bytes = prod(shape[:-1]) * encoding.row_bytes(shape[-1])
        return _TensorInfo(name, shape, encoding, offset, num_bytes)

    def map_tensors(self, infos: list[_TensorInfo], alignment: int) -> dict[str, WeightTensor]:
        """Check where each tensor lies and return views of their data."""
        start = -(-self._position // alignment) * alignment
        tensors: dict[str, WeightTensor] = {}
        end_of_previous = start
        for info in sorted(infos, key=lambda info: info.offset):
            what = f"the tensor {info.name!r:.100}"
            begin, end = start + info.offset, start + info.offset + info.num_bytes
            if info.offset % alignment:
                self.fail(f"{what} is not aligned to {alignment} bytes")
            if end > self._size:
                self.fail(f"{what} would end at byte {end}, but the file has {self._size} bytes")
            if begin < end_of_previous:
                self.fail(f"{what} overlaps another tensor")
            if info.name in tensors:
                self.fail(f"{what} occurs twice")
            end_of_previous = end
            data = np.frombuffer(self._data, np.uint8, info.num_bytes, begin)
            row_bytes = info.encoding.row_bytes(info.shape[-1])
            tensors[info.name] = WeightTensor(
                info.name, info.encoding, info.shape, data.reshape(-1, row_bytes)
            )
        return tensors

    def _check_entries(self, count: int, min_bytes: int, what: str) -> None:
        if count > MAX_ENTRIES or count * min_bytes > self._size - self._position:
            self.fail(f"it claims to have {count} {what}, which do not fit in the file")

    def _need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self._size - self._position:
            self.fail(
                f"it is truncated or corrupt: {what} needs {num_bytes} bytes at byte "
                f"{self._position}, but the file has {self._size} bytes"
            )

    def _unpack(self, layout: struct.Struct, what: str) -> int:
        self._need(layout.size, what)
        value: int = layout.unpack_from(self._data, self._position)[0]
        self._position += layout.size
        return value

    def _string(self, what: str, limit: int) -> str:
        length = self._unpack(_U64, what)
        self._need(length, what)
        if length > limit:
            self.fail(f"{what} is {length} bytes long; at most {limit} are possible")
        raw = self._data[self._position : self._position + length]
        self._position += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8 text")

    def _value(self, value_type: int, what: str) -> MetadataValue:
        if value_type == _STRING:
            return self._string(what, MAX_STRING_BYTES)
        if value_type == _ARRAY:
            return self._array(what)
        value = self._numbers(value_type, 1, what)[0]
        return bool(value) if value_type == _BOOL else value.item()

    def _array(self, what: str) -> list[str] | NDArray[Any]:
        item_type = self._unpack(_U32, what)
        count = self._unpack(_U64, what)
        if item_type == _STRING:
            return self._strings(count, what)
        return self._numbers(item_type, count, what)

    def _numbers(self, item_type: int, count: int, what: str) -> NDArray[Any]:
        if item_type not in _NUMBERS:
            self.fail(f"{what} has the unknown type {item_type}")
        dtype = np.dtype(_NUMBERS[item_type])
        self._need(count * dtype.itemsize, what)
        values = np.frombuffer(self._data, dtype, count, self._position)
        self._position += count * dtype.itemsize
        if item_type == _BOOL:
            if values.size and values.max() > 1:
                self.fail(f"{what} is neither true nor false")
            return values.view(np.bool_)
        return values

    def _strings(self, count: int, what: str) -> list[str]:
        """Read an array of strings in one loop: vocabularies are most of a header's bytes."""
        self._need(count * _U64.size, what)
        self._num_strings += count
        if self._num_strings > MAX_STRINGS:
            self.fail(f"{what} has {count} strings; at most {MAX_STRINGS} are possible in a file")
        data, size, position = self._data, self._size, self._position
        unpack_length = _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                begin = position + 8
                position = begin + unpack_length(data, position)[0]
                if position > size:
                    break
                append(data[begin:position].decode())
        except struct.error:
            self.fail(f"it is truncated or corrupt: it ends inside {what}")
        except UnicodeDecodeError:
            self.fail(f"{what} has a string that is not UTF-8 text")
        if position > size:
            self.fail(f"it is truncated or corrupt: a string of {what} is longer than the file")
        self._position = position
        return strings

    def _encoding(self, code: int, what: str) -> Encoding:
        if code not in _ENCODINGS:
            label = _OTHER_TYPES.get(code, f"number {code}")
            supported = ", ".join(encoding.label for encoding in Encoding)
            self.fail(f"{what} has the type {label}; supported are {supported}")
        return _ENCODINGS[code]


def _alignment(header: _Header, metadata: Mapping[str, MetadataValue]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        header.fail(f"general.alignment must be a power of two, not {alignment!r:.100}")
    return alignment
