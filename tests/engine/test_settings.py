"""Settings of the engine that the machine or the model contradicts."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from octavo.core.errors import SettingError
from octavo.core.events import NullObserver
from octavo.engine import backends
from octavo.engine.factory import EngineSettings, build_engine
from octavo.kernels.native.loading import NOT_BUILT, is_built
from support_engine import Recorder, tiny_parts
from support_loading import write_hf_folder


@pytest.mark.parametrize("asked", [10**24, 1 << 50, 1 << 46])
def test_more_kv_memory_than_the_machine_has_is_refused(tmp_path: Path, asked: int) -> None:
    """Turns red when such a setting ends in a traceback, or in a kill once the KV is written."""
    folder = write_hf_folder(tmp_path / "tiny", "llama")
    settings = EngineSettings(model=folder, served_model_name="tiny", kv_cache_memory_bytes=asked)
    with pytest.raises(SettingError, match="--kv-cache-memory-bytes must not exceed"):
        build_engine(settings, NullObserver())


@pytest.mark.parametrize("block_size", [10**9, 10**15])
def test_a_block_larger_than_the_memory_for_kv_is_refused(tmp_path: Path, block_size: int) -> None:
    """Turns red when one giant block is allocated although no memory was asked for."""
    folder = write_hf_folder(tmp_path / "tiny", "llama")
    settings = EngineSettings(model=folder, served_model_name="tiny", block_size=block_size)
    with pytest.raises(SettingError, match="--block-size"):
        build_engine(settings, NullObserver())


def test_cpus_without_threads_to_put_there_are_refused(tmp_path: Path) -> None:
    """Turns red when the numpy backend ignores --cpu-affinity."""
    folder = write_hf_folder(tmp_path / "tiny", "llama")
    settings = EngineSettings(
        model=folder, served_model_name="tiny", backend="numpy", cpu_affinity=(0,)
    )
    with pytest.raises(SettingError, match="--cpu-affinity needs the native backend"):
        build_engine(settings, NullObserver())


@pytest.mark.parametrize("backend", ["native", "numpy"])
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "stored", "head_bytes"),
    [
        ("float32", "auto", "float32", 4 * 16),
        ("bfloat16", "auto", "bfloat16", 2 * 16),
        ("bfloat16", "float32", "float32", 4 * 16),
        ("float32", "int8", "int8", 16 + 4),
    ],
)
def test_as_many_blocks_as_the_memory_for_kv_holds(
    tmp_path: Path, backend: str, dtype: str, kv_cache_dtype: str, stored: str, head_bytes: int
) -> None:
    """Turns red when a block is counted without its scales, or by the weights' number format."""
    if backend == "native" and not is_built():
        pytest.skip("the native backend was not built")
    parts = tiny_parts(
        tmp_path / "tiny",
        Recorder(),
        backend=backend,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory_bytes=1 << 20,
    )
    info = parts.info
    assert info.dtype == stored
    assert info.precision == dtype
    block_bytes = 3 * 2 * 2 * 16 * head_bytes  # layers, keys and values, heads, slots
    assert info.num_blocks == (1 << 20) // block_bytes


def test_an_unknown_number_format_of_kv_is_refused(tmp_path: Path) -> None:
    """Turns red when a typing mistake in Python falls back to some format."""
    with pytest.raises(SettingError, match="--kv-cache-dtype must be one of auto, float32"):
        tiny_parts(tmp_path / "tiny", Recorder(), kv_cache_dtype="fp8")


def test_an_engine_without_native_kernels_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns red when an installation without a compiler computes slowly and nobody knows why."""
    monkeypatch.setattr(backends, "is_built", lambda: False)
    folder = write_hf_folder(tmp_path / "tiny", "llama")
    parts = build_engine(EngineSettings(model=folder, served_model_name="t"), NullObserver())
    assert parts.info.backend == "numpy"
    assert [record.getMessage() for record in caplog.records] == [NOT_BUILT]


@pytest.mark.parametrize(
    ("choices", "precision"),
    [
        ({}, "int8"),
        ({"quantization": "none"}, "bfloat16"),
        ({"quantization": "none", "dtype": "float32"}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"quantization": "file"}, "file"),
    ],
)
def test_how_weights_are_held(
    tmp_path: Path, choices: Mapping[str, object], precision: str
) -> None:
    """Turns red when a number format that was asked for is quantised all the same, or a model that
    is not quantised runs wider than it must by default."""
    if not is_built():
        pytest.skip("the native backend was not built")
    assert (
        tiny_parts(tmp_path / "tiny", Recorder(), **{"dtype": "auto", **choices}).info.precision
        == precision
    )


@pytest.mark.model
def test_quantised_weights_run_as_the_file_has_them(model_path: Path) -> None:
    """Turns red when the default model's 4 bits are quantised anew, or widened."""
    if not is_built():
        pytest.skip("the native backend was not built")
    settings = EngineSettings(
        model=model_path, served_model_name="smollm2", kv_cache_memory_bytes=64 << 20
    )
    assert build_engine(settings, NullObserver()).info.precision == "file"


@pytest.mark.parametrize("quantization", ["file", "int8"])
def test_numpy_does_not_quantise(tmp_path: Path, quantization: str) -> None:
    """Turns red when the numpy backend ignores --quantization."""
    with pytest.raises(SettingError, match=f"--quantization {quantization} needs the native"):
        tiny_parts(tmp_path / "tiny", Recorder(), backend="numpy", quantization=quantization)


@pytest.mark.parametrize("setting", ["backend", "dtype", "quantization", "kv_cache_dtype"])
def test_unknown_choices_end_in_a_sentence(tmp_path: Path, setting: str) -> None:
    """Turns red when a misspelt number format is taken for another."""
    flag = f"--{setting.replace('_', '-')}"
    with pytest.raises(SettingError, match=f"{flag} must be one of auto, .*, not 'int9'"):
        tiny_parts(tmp_path / "tiny", Recorder(), **{setting: "int9"})
