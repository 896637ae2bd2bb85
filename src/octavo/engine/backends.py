"""Which backend computes, and in which number formats."""

from dataclasses import dataclass
from typing import Final, Literal

from octavo.core.errors import SettingError
from octavo.kernels.native.loading import is_built, require_built
from octavo.kernels.native.options import NativeOptions
from octavo.kernels.numpy_backend import NumpyBackend
from octavo.kernels.ops import Backend

DtypeName = Literal["auto", "float32", "bfloat16"]
QuantizationName = Literal["auto", "none", "file", "int8"]
KVDtype = Literal["float32", "bfloat16"]
BACKENDS: Final = ("auto", "native", "numpy")


@dataclass(frozen=True, slots=True)
class Compute:
    """A backend and what it was asked to be."""

    backend: Backend
    kv_dtype: KVDtype
    precision: str
    """How weights are held; KV computed in another precision is other KV."""


def choose_backend(
    name: str, dtype: DtypeName, quantization: QuantizationName, options: NativeOptions
) -> Compute:
    """Make the backend that a user asks for (see ``EngineSettings`` for the meanings).

    Raises:
        SettingError: there is no such backend here, or it cannot do what is asked.
    """
    if name not in BACKENDS:
        raise SettingError(
            f"--backend must be one of {', '.join(BACKENDS)}, not {name!r}.", name="--backend"
        )
    if name == "numpy" or (name == "auto" and not is_built()):
        return _numpy(dtype, quantization, options)
    return _native(dtype, quantization, options)


def _numpy(dtype: DtypeName, quantization: QuantizationName, options: NativeOptions) -> Compute:
    if options.cpus:
        raise SettingError("--cpu-affinity needs the native backend.", name="--cpu-affinity")
    if quantization in ("file", "int8"):
        raise SettingError(
            f"--quantization {quantization} needs the native backend; numpy computes with none.",
            name="--quantization",
        )
    chosen: KVDtype = "float32" if dtype == "auto" else dtype
    return Compute(NumpyBackend(chosen), chosen, chosen)


def _native(dtype: DtypeName, quantization: QuantizationName, options: NativeOptions) -> Compute:
    require_built()
    from octavo.kernels.native.backend import NativeBackend
    from octavo.kernels.native.weights import Precision

    kv_dtype: KVDtype = "bfloat16" if dtype == "auto" else dtype
    precision: Precision = kv_dtype
    if quantization in ("file", "int8"):
        precision = quantization
    return Compute(NativeBackend(precision, options), kv_dtype, precision)
