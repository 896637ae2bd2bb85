"""Safetensors folders: which files count, and what is refused."""

import json
import logging
import os
import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.core.errors import LoadError
from octavo.kernels.dequantize import to_float32
from octavo.models import safetensors_files
from octavo.models.checkpoint import open_checkpoint
from octavo.models.model_folder import ModelFolder
from octavo.models.safetensors_files import INDEX_NAME, SafetensorsFile, open_folder_weights
from support_loading import (
    random_weights,
    write_hf_folder,
    write_index,
    write_safetensors,
    write_safetensors_raw,
)

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def refused(folder: Path) -> str:
    """Check that a folder is refused in one sentence, which is returned."""
    with pytest.raises(LoadError) as caught:
        open_checkpoint(folder)
    assert "\n" not in caught.value.message
    assert caught.value.message.endswith(".")
    return caught.value.message


def weight_map(folder: Path) -> dict[str, str]:
    """Return the index's map."""
    return json.loads((folder / INDEX_NAME).read_text())["weight_map"]  # type: ignore[no-any-return]


# --- the format -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_equals_the_safetensors_package(dtype: str, tmp_path: Path) -> None:
    """A file written by the package reads back value for value."""
    rng = np.random.default_rng(0)
    wanted = {"a": rng.standard_normal((3, 5)).astype(dtype), "b": np.arange(7).astype(dtype)}
    safetensors.numpy.save_file(wanted, tmp_path / "x.safetensors", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file) == {"a", "b"}
    for name, values in wanted.items():
        assert file[name].shape == values.shape
        assert np.array_equal(to_float32(file[name]), values.astype(np.float32))


@pytest.mark.reference
def test_bfloat16_equals_torch(tmp_path: Path) -> None:
    """bfloat16, which numpy lacks, reads as torch wrote it."""
    import safetensors.torch
    import torch

    values = torch.randn(4, 6).to(torch.bfloat16)
    safetensors.torch.save_file({"a": values}, tmp_path / "x.safetensors")
    ours = to_float32(SafetensorsFile(tmp_path / "x.safetensors")["a"])
    assert np.array_equal(ours, values.float().numpy())


BAD_HEADERS: dict[str, tuple[dict[str, object] | bytes, bytes, str]] = {
    "not JSON": (b"{nope", b"", "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "not valid JSON"),
    "nested too deep": (b"[" * 100_000, b"", "not valid JSON"),
    "a list": (b"[]", b"", "JSON object"),
    "a key twice": (b'{"a": {}, "a": {}}', b"", "occurs twice"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8), "must have dtype"),
    "not an entry": ({"a": 1}, b"", "must have dtype"),
    "negative shape": ({"a": {**ONE, "shape": [-2]}}, bytes(8), "shape"),
    "shape of floats": ({"a": {**ONE, "shape": [2.0]}}, bytes(8), "shape"),
    "shape of booleans": ({"a": {**ONE, "shape": [True, 2]}}, bytes(8), "shape"),
    "shape wraps": ({"a": {**ONE, "shape": [2**62 + 2, 4]}}, bytes(8), "do not match"),
    "short data": ({"a": ONE}, bytes(7), "truncated"),
    "rest of data": ({"a": ONE}, bytes(12), "truncated or corrupt"),
    "offsets wrong way": ({"a": {**ONE, "data_offsets": [8, 0]}}, bytes(8), "do not match"),
    "offsets past the end": ({"a": {**ONE, "data_offsets": [8, 16]}}, bytes(8), "gap"),
    "overlap": ({"a": ONE, "b": {**ONE, "data_offsets": [4, 12]}}, bytes(12), "overlaps"),
    "gap": ({"a": ONE, "b": {**ONE, "data_offsets": [12, 20]}}, bytes(20), "gap"),
    "unknown dtype": ({"a": {**ONE, "dtype": "F33"}}, bytes(8), "unknown dtype"),
    "dtype of another kind": ({"a": {**ONE, "dtype": [1]}}, bytes(8), "impossible dtype"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_headers(name: str, tmp_path: Path) -> None:
    """LO-05, for safetensors: a malformed header is refused for what is wrong with it."""
    header, data, reason = BAD_HEADERS[name]
    path = tmp_path / "x.safetensors"
    write_safetensors_raw(path, header, data)
    with pytest.raises(LoadError, match=reason):
        SafetensorsFile(path)


@pytest.mark.parametrize("length", [9, 2**32, 2**63, 2**64 - 1])
def test_header_longer_than_the_file(length: int, tmp_path: Path) -> None:
    """LO-05, for safetensors: the header's length is checked before it is read."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}      ")
    with pytest.raises(LoadError, match="truncated"):
        SafetensorsFile(path)


def test_header_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that is there but absurdly long is not parsed."""
    monkeypatch.setattr(safetensors_files, "MAX_HEADER_BYTES", 64)
    path = tmp_path / "x.safetensors"
    write_safetensors_raw(path, b"{}" + b" " * 100, b"")
    with pytest.raises(LoadError, match="header"):
        SafetensorsFile(path)


def test_unsupported_dtype_names_the_tensor(tmp_path: Path) -> None:
    """A quantised or integer tensor is refused by name when it is needed, not read as floats."""
    path = tmp_path / "x.safetensors"
    write_safetensors_raw(path, {"a": {**ONE, "dtype": "I32"}}, bytes(8))
    with pytest.raises(LoadError, match="tensor a has the dtype I32"):
        SafetensorsFile(path)["a"]


@settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_mutated_files(tmp_path: Path, data: st.DataObject) -> None:
    """LO-05, for safetensors: no mutation and no cut crashes the reader or reads past the end."""
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(raw) - 41))
        patch = data.draw(st.binary(min_size=1, max_size=4))
        raw[position : position + len(patch)] = patch
    path.write_bytes(raw[: data.draw(st.integers(1, len(raw)))])
    try:
        file = SafetensorsFile(path)
        tensors = [file[name] for name in file]
    except LoadError:
        return
    for tensor in tensors:
        assert tensor.data.size == np.prod(tensor.shape) * tensor.encoding.block_bytes


# --- shards and the index -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lost", [[2], [1, 3], [1, 2, 3]])
def test_a_shard_is_absent(dtype: str, lost: list[int], tmp_path: Path) -> None:
    """LO-09: files that the index names and the folder lacks are listed, whatever the dtype."""
    folder = write_hf_folder(tmp_path / "m", "llama", shards=3, dtype=dtype)
    names = [f"model-{index:05}-of-00003.safetensors" for index in lost]
    for name in names:
        (folder / name).unlink()
    message = refused(folder)
    assert f"{len(lost)} file" in message
    assert all(name in message for name in names)


def test_the_index_names_a_tensor_its_shard_lacks(tmp_path: Path) -> None:
    """LO-09: a tensor that is in the index only is listed."""
    folder = write_hf_folder(tmp_path / "m", "llama", shards=2)
    mapping = weight_map(folder)
    write_index(folder, mapping | {"model.ghost.weight": mapping["model.norm.weight"]})
    assert "1 tensor (model.ghost.weight) that its files lack" in refused(folder)


def test_the_index_names_the_wrong_shard(tmp_path: Path) -> None:
    """LO-09: a tensor that another shard holds counts as lacking, so that no copy is guessed."""
    folder = write_hf_folder(tmp_path / "m", "llama", shards=2)
    mapping = weight_map(folder)
    other = next(file for file in set(mapping.values()) if file != mapping["model.norm.weight"])
    write_index(folder, mapping | {"model.norm.weight": other})
    assert "model.norm.weight" in refused(folder)


def test_a_shard_has_a_tensor_the_index_lacks(tmp_path: Path) -> None:
    """LO-09: a tensor that is in a shard only is listed, not dropped in silence."""
    folder = write_hf_folder(tmp_path / "m", "llama", shards=2)
    mapping = weight_map(folder)
    del mapping["model.norm.weight"]
    write_index(folder, mapping)
    assert "does not name 1 tensor (model.norm.weight)" in refused(folder)


@pytest.mark.parametrize(
    "index",
    ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "{", ""],
)
def test_an_index_that_is_none(index: str, tmp_path: Path) -> None:
    """LO-09: an index without a usable map is refused, not taken for an empty model."""
    folder = write_hf_folder(tmp_path / "m", "llama", shards=2)
    (folder / INDEX_NAME).write_text(index)
    assert INDEX_NAME in refused(folder)


def test_stray_files_do_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LO-10: the index decides; an unrelated model.safetensors, consolidated and .bin files beside
    it change nothing and are named in a warning."""
    clean = write_hf_folder(tmp_path / "clean", "llama", shards=2)
    folder = write_hf_folder(tmp_path / "m", "llama", shards=2)
    other = write_hf_folder(tmp_path / "other", "llama", seed=9, dtype="bfloat16")
    strays = (
        "model.safetensors",
        "consolidated.00.safetensors",
        "model-00001-of-00009.safetensors",
    )
    for name in strays:
        (folder / name).write_bytes((other / "model.safetensors").read_bytes())
    (folder / "pytorch_model-00001-of-00002.bin").write_bytes(b"junk")
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(folder)
    assert checkpoint.fingerprint == open_checkpoint(clean).fingerprint
    assert all(name in caplog.text for name in (*strays, "pytorch_model-00001-of-00002.bin"))


def test_a_single_file_ignores_strays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LO-10: without an index only model.safetensors counts."""
    folder = write_hf_folder(tmp_path / "m", "llama")
    before = open_checkpoint(folder).fingerprint
    (folder / "consolidated.safetensors").write_bytes(b"junk")
    (folder / "pytorch_model.bin").write_bytes(b"junk")
    with caplog.at_level(logging.WARNING):
        assert open_checkpoint(folder).fingerprint == before
    assert "consolidated.safetensors, pytorch_model.bin" in caplog.text


def test_a_stale_index(tmp_path: Path) -> None:
    """LO-10: an index that names old files is an error even beside a whole model.safetensors."""
    folder = write_hf_folder(tmp_path / "m", "llama")
    write_index(folder, {"model.norm.weight": "old-00001-of-00001.safetensors"})
    message = refused(folder)
    assert "old-00001-of-00001.safetensors" in message
    assert "out of date" in message


# --- nothing runs, nothing outside is read -------------------------------------------------------


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "pytorch_model.bin.index.json"]
)
def test_pickled_weights_never_run(name: str, tmp_path: Path) -> None:
    """LO-07: a folder with pickled weights only is refused, and its code does not run."""
    folder = write_hf_folder(tmp_path / "m", "llama")
    (folder / "model.safetensors").unlink()
    marker = tmp_path / "marker"
    (folder / name).write_bytes(pickle.dumps(Trap(marker)))
    assert "safetensors" in refused(folder)
    assert not marker.exists()


def test_custom_code_never_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LO-07: auto_map and Python files in a folder are left alone; the built-in decoder serves."""
    auto_map = {"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"}
    folder = write_hf_folder(tmp_path / "m", "llama", config_overrides={"auto_map": auto_map})
    marker = tmp_path / "marker"
    for name in ("modeling_evil.py", "configuration_evil.py", "__init__.py"):
        (folder / name).write_text(f"open({str(marker)!r}, 'w')")
    with caplog.at_level(logging.WARNING):
        open_checkpoint(folder)
    assert "auto_map" in caplog.text
    assert not marker.exists()


def test_an_unknown_architecture_with_custom_code(tmp_path: Path) -> None:
    """LO-07: a model type that only custom code could serve is refused by key."""
    overrides = {"model_type": "evil", "architectures": ["EvilForCausalLM"], "auto_map": {}}
    folder = write_hf_folder(tmp_path / "m", "llama", config_overrides=overrides)
    assert "architectures" in refused(folder)


@pytest.mark.parametrize("absolute", [True, False])
def test_shards_stay_inside(absolute: bool, tmp_path: Path) -> None:
    """LO-07: a shard named by ``../`` or by an absolute path is refused though it exists."""
    outside = write_hf_folder(tmp_path / "outside", "llama") / "model.safetensors"
    folder = write_hf_folder(tmp_path / "m", "llama")
    (folder / "model.safetensors").unlink()
    name = str(outside) if absolute else "../outside/model.safetensors"
    write_index(folder, {"model.norm.weight": name})
    assert "not the plain name of a file" in refused(folder)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b.safetensors", "a\\b", "c:x", "a\0b"])
def test_names_that_are_paths(name: str, tmp_path: Path) -> None:
    """LO-07: only plain names pass, on every system's idea of a path."""
    with pytest.raises(LoadError, match="plain name"):
        ModelFolder(tmp_path).file(name)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_links_out_of_the_folder(name: str, tmp_path: Path) -> None:
    """LO-07: a symbolic link that leads out is refused, for weights and settings alike."""
    folder = write_hf_folder(tmp_path / "m", "llama")
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    assert "leads out of the model's folder" in refused(folder)


def test_links_inside_and_in_the_hub_cache(tmp_path: Path) -> None:
    """The Hugging Face cache works: snapshots link to blobs of the same repository, and a link
    may be relative or absolute; blobs of another repository stay out of reach."""
    plain = open_checkpoint(write_hf_folder(tmp_path / "plain", "llama", shards=2))
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc123", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, file in enumerate(sorted((tmp_path / "plain").iterdir())):
        (blobs / f"blob{index}").write_bytes(file.read_bytes())
        target = Path("../../blobs") if index % 2 else blobs
        (snapshot / file.name).symlink_to(target / f"blob{index}")
    assert open_checkpoint(snapshot).fingerprint == plain.fingerprint
    alias = tmp_path / "alias"
    alias.symlink_to(snapshot)
    assert open_checkpoint(alias).name == "abc123"

    other = tmp_path / "models--org--other" / "snapshots" / "abc123"
    other.mkdir(parents=True)
    for file in snapshot.iterdir():
        (other / file.name).symlink_to(file.resolve())
    assert "leads out" in refused(other)


def test_a_circle_of_links(tmp_path: Path) -> None:
    """Links that lead nowhere end in a sentence."""
    folder = write_hf_folder(tmp_path / "m", "llama")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    assert "config.json" in refused(folder)


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    """Each way of naming the wrong thing gets the sentence that helps."""
    assert "no config.json, so it is not a model's folder" in refused(tmp_path)
    folder = write_hf_folder(tmp_path / "m", "llama")
    assert "name the folder" in refused(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in refused(folder)
    (folder / "a.gguf").write_bytes(b"GGUF")
    assert "name that file itself" in refused(folder)
    (folder / "config.json").unlink()
    assert "name that file itself" in refused(folder)
    (folder / "config.json").write_text("{")
    assert "not valid JSON" in refused(folder)


def test_other_names_of_other_parts(tmp_path: Path) -> None:
    """A tensor that no decoder of this kind has is listed; stored rope tables are not weights."""

    def add(name: str) -> Callable[[dict[str, np.ndarray]], None]:
        return lambda weights: weights.update({name: np.ones(8, np.float32)})

    table = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = write_hf_folder(tmp_path / "table", "llama", edit=add(table))
    assert "rope_freqs.weight" not in open_checkpoint(folder).tensors
    for name in ("model.layers.0.mlp.experts.0.up_proj.weight", "vision_tower.x", "lm_head.bias"):
        folder = write_hf_folder(tmp_path / name, "llama", edit=add(name))
        assert name in refused(folder)


def test_weights_open_without_reading_them(tmp_path: Path) -> None:
    """Tensors are views of the mapped file, not copies."""
    folder = write_hf_folder(tmp_path / "m", "llama", shards=2)
    weights: Mapping[str, object] = open_folder_weights(ModelFolder(folder))
    assert set(weights) == set(
        random_weights("llama", json.loads((folder / "config.json").read_text()), 0)
    )
    tensor = open_checkpoint(folder).tensors["blk.0.attn_q.weight"]
    assert not tensor.data.flags.owndata
    assert not tensor.data.flags.writeable
