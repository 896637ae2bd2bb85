"""Hands out a model's tensors by canonical name, each checked and each used exactly once."""

from collections.abc import Mapping

from octavo.core.errors import LoadError
from octavo.kernels.weights import WeightTensor


class WeightShelf:
    """The tensors of a model, of which a decoder takes what it needs.

    Each is there with the expected shape, and in the end all have been taken; else ``LoadError``.
    """

    def __init__(self, tensors: Mapping[str, WeightTensor]) -> None:
        self._tensors = tensors
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> WeightTensor:
        """Return the tensor called ``name``, whose shape must be ``shape``."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise LoadError(f"The model lacks the tensor {name}.")
        if tensor.shape != shape:
            raise LoadError(
                f"The tensor {name} has shape {tensor.shape}, but the configuration "
                f"asks for {shape}."
            )
        self._taken.add(name)
        return tensor

    def check_all_taken(self) -> None:
        """Raise ``LoadError`` if a tensor is left that the architecture has no use for."""
        left = sorted(self._tensors.keys() - self._taken)
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise LoadError(
                f"The model has tensors that its architecture does not use: "
                f"{', '.join(left[:3])}{more}."
            )
