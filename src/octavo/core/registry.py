"""Choosing a policy by name, or a user's own by ``module:Class``."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Generic, TypeVar

from octavo.core.errors import SettingError

PolicyT = TypeVar("PolicyT")


class Registry(Generic[PolicyT]):
    """Makes policies of one kind; a name appears in exactly one registry.

    Args:
        setting: the setting as a user writes it, for error messages (``--scheduling-policy``).
        methods: those that every policy of this kind must have; the first says most of it.
        policies: makers by name; each is called with the arguments of ``create``.
    """

    def __init__(
        self,
        setting: str,
        methods: tuple[str, ...],
        policies: Mapping[str, Callable[..., PolicyT]],
    ) -> None:
        self._setting = setting
        self._methods = methods
        self._policies = dict(policies)

    @property
    def names(self) -> tuple[str, ...]:
        """Names that a user can choose."""
        return tuple(self._policies)

    def create(self, name: str, *args: object) -> PolicyT:
        """Make the policy called ``name``; with a colon it is a user's ``module:Class``.

        Most kinds are made without ``args``.

        Raises:
            SettingError: there is no such policy, or the user's class cannot be imported, made
                with these arguments, or lacks a method.
        """
        if ":" in name:
            return self._import(name, args)
        try:
            maker = self._policies[name]
        except KeyError:
            raise SettingError(
                f"{self._setting} must be one of {', '.join(self._policies)} or module:Class, "
                f"not {name!r}.",
                name=self._setting,
            ) from None
        return maker(*args)

    def _import(self, name: str, args: tuple[object, ...]) -> PolicyT:
        module_name, _, class_name = name.partition(":")
        try:
            policy: PolicyT = getattr(import_module(module_name), class_name)(*args)
        except Exception as error:  # whatever the user's code raises, it cannot serve
            raise SettingError(
                f"{self._setting} {name!r} cannot be made: {type(error).__name__}: {error}.",
                name=self._setting,
            ) from error
        for method in self._methods:
            if not callable(getattr(policy, method, None)):
                raise SettingError(
                    f"{self._setting} {name!r} has no method {method}().", name=self._setting
                )
        return policy
