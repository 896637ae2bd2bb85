"""A digest that tells models apart, cheap enough to take at every start."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from octavo.kernels.weights import WeightTensor
from octavo.models.config import DecoderConfig

FULL_BYTES: Final = 64 * 1024
"""Tensors up to this size are hashed whole."""
NUM_SAMPLES: Final = 16
SAMPLE_BYTES: Final = 512


def weights_fingerprint(config: DecoderConfig, tensors: Mapping[str, WeightTensor]) -> str:
    """Return a hex digest of ``config`` and of ``tensors`` as they are stored.

    It covers each tensor's name, encoding and shape, all bytes of small tensors, and samples
    spread evenly over large ones. Training, merging or quantising anew moves nearly every weight
    and so changes it; an edit of a few bytes of a large tensor may not. File names, sharding and
    dates do not count: copies of a model share their KV.
    """
    digest = hashlib.sha256(repr(config).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.encoding.label} {tensor.shape}\n".encode())
        data = tensor.data.reshape(-1)
        if data.size <= FULL_BYTES:
            digest.update(data.tobytes())
            continue
        for index in range(NUM_SAMPLES):
            start = (data.size - SAMPLE_BYTES) * index // (NUM_SAMPLES - 1)
            digest.update(data[start : start + SAMPLE_BYTES].tobytes())
    return digest.hexdigest()


def file_version(path: Path) -> str:
    """Return size and time of change of a model's file, or of all weight files of its folder.

    Beside ``weights_fingerprint`` it tells versions of one model apart whose samples are equal.
    """
    files = sorted(path.glob("*.safetensors")) if os.path.isdir(path) else [path]
    stats = [(file.name, file.stat()) for file in files]
    return " ".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)
