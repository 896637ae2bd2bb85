"""What tests of several packages share: where data lies that a clone may or may not have."""

from pathlib import Path

from octavo.models.aliases import SMOLLM2
from octavo.models.source import default_cache_dir

REPO = Path(__file__).resolve().parent.parent
SHARED = REPO.parent / "shared"
PATIENCE_S = 120.0
"""How long a test waits for what must come: it is to end tests that would hang, and no others."""


def default_model() -> Path | None:
    """Return the default model's file if this machine has it, without fetching it."""
    path = SMOLLM2.path_in(default_cache_dir())
    return path if path.is_file() else None
