"""Typed, bounded reading of a model's settings, with errors that name the key."""

import math
from collections.abc import Mapping
from typing import Final, NoReturn

from octavo.core.errors import LoadError

MAX_INTEGER: Final = 1 << 28
"""Above every size that a model can have."""
MAX_LAYERS: Final = 1000


class ConfigValues:
    """A group of settings. A null value counts as absent."""

    def __init__(self, values: Mapping[str, object], where: str, prefix: str = "") -> None:
        """``where`` names the file in messages; ``prefix`` completes a key's name there."""
        self._values = values
        self._where = where
        self._prefix = prefix
        self._read: set[str] = set()

    def fail(self, key: str, reason: str) -> NoReturn:
        """Raise the error of ``key``: ``reason`` continues a sentence that starts with it."""
        raise LoadError(f"{self._where}: {self._prefix}{key} {reason}.")

    def has(self, key: str) -> bool:
        """Whether ``key`` is present and not null."""
        return self.raw(key) is not None

    def raw(self, key: str) -> object:
        """Return the unchecked value, None if absent."""
        self._read.add(key)
        return self._values.get(key)

    def unread(self) -> set[str]:
        """Return the keys whose value is not null and that nobody has asked for yet."""
        return {key for key, value in self._values.items() if value is not None} - self._read

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_INTEGER
    ) -> int:
        """Return a whole number from ``low`` to ``high``; without a default it must be there."""
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(key, f"must be a whole number from {low} to {high}, not {value!r:.100}")
        return value

    def number(self, key: str, default: float | None = None, *, low: float = 0.0) -> float:
        """Return a finite number above ``low``."""
        value = self._value(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if low < number < math.inf:
                return number
        self.fail(key, f"must be a number above {low:g}, not {value!r:.100}")

    def optional_number(self, key: str) -> float | None:
        """Return a finite positive number, or None if absent."""
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, not {value!r:.100}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            self.fail(key, f"must be text, not {value!r:.100}")
        return value

    def group(self, key: str) -> "ConfigValues":
        """Return the settings nested under ``key``, none if it is absent."""
        value = self._value(key, {})
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            self.fail(key, f"must be a group of settings, not {value!r:.100}")
        return ConfigValues(value, self._where, f"{self._prefix}{key}.")

    def refuse(self, key: str, *harmless: object) -> None:
        """Raise if ``key`` is present with a value other than the ``harmless`` ones."""
        value = self.raw(key)
        if value is None or (isinstance(value, bool | int | float | str) and value in harmless):
            return
        self.fail(key, f"is {value!r:.100}, which is not supported")

    def _value(self, key: str, default: object) -> object:
        value = self.raw(key)
        if value is not None:
            return value
        if default is None:
            self.fail(key, "is missing")
        return default


def check_heads(values: ConfigValues, keys: tuple[str, str], heads: int, kv_heads: int) -> None:
    """Raise unless each KV head serves the same number of query heads; ``keys`` name the two."""
    if heads % kv_heads:
        values.fail(keys[1], f"({kv_heads}) must divide {keys[0]} ({heads})")


def head_dim_of(values: ConfigValues, keys: tuple[str, str, str], hidden: int, heads: int) -> int:
    """Return the size of a head; ``keys`` name it, the hidden size and the number of heads."""
    if values.has(keys[0]):
        head_dim = values.integer(keys[0], high=1 << 14)
    elif hidden % heads:
        values.fail(keys[1], f"({hidden}) must be a multiple of {keys[2]} ({heads})")
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        values.fail(keys[0], f"must be even for a rotary embedding, not {head_dim}")
    return head_dim


def stretched_length(values: ConfigValues, key: str, original: int, factor: float) -> int:
    """Return ``original`` times the ``factor`` that ``key`` names: a stretched context length."""
    length = original * factor
    if not 1 <= length <= MAX_INTEGER:
        values.fail(key, f"is {factor:g}, which makes an impossible context length of {length:g}")
    return int(length)
