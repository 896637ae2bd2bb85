"""What tests of several packages share: where data lies that a clone may or may not have."""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
SHARED = REPO.parent / "shared"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_model() -> Path | None:
    """Return the default model's file if this machine has it, without fetching it."""
    cache = Path(os.environ.get("OCTAVO_CACHE", Path.home() / ".cache" / "octavo"))
    path = cache / "models" / "smollm2" / MODEL_FILE
    return path if path.is_file() else None
