"""Whether this installation has the compiled extension, asked without loading it."""

from importlib.util import find_spec
from typing import Final

from octavo.core.errors import SettingError

NOT_BUILT: Final = (
    "The native backend was not built, because no C++ compiler was found at install time; "
    "install one and reinstall octavo, or make do with --backend numpy (slow)."
)


def is_built() -> bool:
    """Return whether the native backend can be imported."""
    return find_spec("octavo.kernels.native._native") is not None


def require_built() -> None:
    """Raise ``SettingError`` with one sentence if the native backend cannot be imported."""
    if not is_built():
        raise SettingError(NOT_BUILT, name="--backend")
