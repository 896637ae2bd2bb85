"""Which backend computes, and in which number formats."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from octavo.core.errors import SettingError
from octavo.kernels.native.loading import NOT_BUILT, is_built, require_built
from octavo.kernels.native.options import NativeOptions
from octavo.kernels.numpy_backend import NumpyBackend
from octavo.kernels.ops import Backend, KVDtype
from octavo.kernels.weights import WeightTensor

logger = logging.getLogger(__name__)

DtypeName = Literal["auto", "float32", "bfloat16"]
QuantizationName = Literal["auto", "none", "file", "int8", "int4"]
KVCacheDtypeName = Literal["auto", "float32", "bfloat16", "int8"]
BACKENDS: Final = ("auto", "native", "numpy")


@dataclass(frozen=True, slots=True)
class Compute:
    """A backend and what it was asked to be."""

    backend: Backend
    kv_dtype: KVDtype
    """Number format of KV; KV in another format is other KV."""
    precision: str
    """How weights are held; KV computed in another precision is other KV."""


def choose_backend(
    name: str,
    dtype: DtypeName,
    quantization: QuantizationName,
    options: NativeOptions,
    kv_cache_dtype: KVCacheDtypeName = "auto",
    tensors: Iterable[WeightTensor] = (),
) -> Compute:
    """Make the backend that a user asks for (see ``EngineSettings`` for the meanings).

    ``tensors`` are the model's; ``auto`` looks at their encodings.

    Raises:
        SettingError: there is no such backend here, or it cannot do what is asked.
    """
    _check("--backend", name, BACKENDS)
    _check("--dtype", dtype, get_args(DtypeName))
    _check("--quantization", quantization, get_args(QuantizationName))
    _check("--kv-cache-dtype", kv_cache_dtype, get_args(KVCacheDtypeName))
    is_last_resort = name == "auto" and not is_built()
    if is_last_resort:
        logger.warning(NOT_BUILT)
    if name == "numpy" or is_last_resort:
        compute = _numpy(dtype, quantization, options)
    else:
        compute = _native(dtype, quantization, options, tensors)
    return compute if kv_cache_dtype == "auto" else replace(compute, kv_dtype=kv_cache_dtype)


def _check(setting: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SettingError(
            f"{setting} must be one of {', '.join(known)}, not {value!r}.", name=setting
        )


def _numpy(dtype: DtypeName, quantization: QuantizationName, options: NativeOptions) -> Compute:
    if options.cpus:
        raise SettingError("--cpu-affinity needs the native backend.", name="--cpu-affinity")
    if options.deterministic:
        raise SettingError(
            "--deterministic needs the native backend: numpy's sums depend on the batch.",
            name="--deterministic",
        )
    if quantization not in ("auto", "none"):
        raise SettingError(
            f"--quantization {quantization} needs the native backend; numpy computes with none.",
            name="--quantization",
        )
    chosen = "float32" if dtype == "auto" else dtype
    return Compute(NumpyBackend(chosen), chosen, chosen)


def _native(
    dtype: DtypeName,
    quantization: QuantizationName,
    options: NativeOptions,
    tensors: Iterable[WeightTensor],
) -> Compute:
    require_built()
    from octavo.kernels.native.backend import NativeBackend
    from octavo.kernels.native.weights import Precision

    chosen = "bfloat16" if dtype == "auto" else dtype
    precision: Precision
    if quantization == "none" or (quantization == "auto" and dtype != "auto"):
        precision = chosen
    elif quantization == "auto":
        precision = "file" if any(tensor.encoding.is_quantised for tensor in tensors) else "int8"
    else:
        precision = quantization
    return Compute(NativeBackend(precision, options), chosen, precision)
