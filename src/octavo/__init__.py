"""Octavo: an LLM inference server whose KV cache you can see, steer and trust.

>>> from octavo import LLM, SamplingParams
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.core.sampling import SamplingParams
    from octavo.engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the public names when first asked for, so that ``import octavo`` stays light."""
    if name == "LLM":
        from octavo.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from octavo.core.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
