"""Reading a body: strict JSON, strict types, and one sentence about what is wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from octavo.core.errors import InvalidRequestError

BRANCH: Final = "@"
"""Marks the branches of unions in error paths, so that clients never see them."""
MAX_KEY_CHARS: Final = 64
MAX_NESTING: Final = 100
"""Most arrays and objects inside one another: what is deeper, JSON writers and templates cannot
write, and nobody means."""

_WORDS: Final = (
    ("Input should be", "must be"),
    ("Value should", "must"),
    ("String should", "must"),
    ("List should", "must"),
    ("Dictionary should", "must"),
    ("a valid list", "an array"),
    ("a valid dictionary", "an object"),
    ("a valid ", "a "),
    ("be a integer", "be an integer"),
)
"""From pydantic's words to JSON's."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A known parameter that this server does not honour."""

    why: str
    neutral: tuple[Any, ...] = ()
    """Values that ask for what happens anyway, besides null and an empty list."""

    def is_neutral(self, value: object) -> bool:
        """Whether ``value`` asks for nothing."""
        return value == [] or any(
            type(value) is type(item) and value == item for item in self.neutral
        )


class StrictModel(BaseModel):
    """A body or a part of one: no coercion, no unknown field, null means the default."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        defer_build=True,  # by its first use: a start that builds all is a third longer
    )
    unsupported: ClassVar[Mapping[str, Unsupported]] = {}
    """Known fields that are refused by name."""
    differences: ClassVar[Mapping[str, str]] = {}
    """Fields that are accepted and do not do all that the API says, and how so."""

    @model_validator(mode="before")
    @classmethod
    def _settle_unsupported(cls, data: Any) -> Any:
        """Drop nulls and neutral values of known fields; refuse unsupported ones by name."""
        if not isinstance(data, dict):
            return data
        kept = {}
        for key, value in data.items():
            if key in cls.unsupported:
                if value is None or cls.unsupported[key].is_neutral(value):
                    continue
                context = {"key": key, "why": cls.unsupported[key].why}
                raise PydanticCustomError("unsupported", "{key} is not supported: {why}", context)
            if value is None and key in cls.model_fields:
                continue
            kept[key] = value
        return kept

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read a request's body.

        Raises:
            InvalidRequestError: it is no JSON object or does not fit; ``param`` names where.
        """
        return validate(cls, load_json(body))


Model = TypeVar("Model", bound=BaseModel)


def load_json(body: bytes) -> dict[str, Any]:
    """Read a JSON object; NaN, Infinity and numbers beyond a double are no JSON."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(
            f"The body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    if not isinstance(data, dict):
        raise InvalidRequestError(f"The body must be a JSON object, not {_kind(data)}.")
    # Few brackets cannot be deep; counting them is quick, also where there are millions of numbers.
    if body.count(b"[") + body.count(b"{") > MAX_NESTING and nests_deeply(data):
        raise InvalidRequestError(
            f"The body is nested too deeply: at most {MAX_NESTING} arrays and objects may be "
            "inside one another."
        )
    return data


def nests_deeply(value: Any) -> bool:
    """Whether more than ``MAX_NESTING`` arrays and objects are inside one another."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [
            item
            for outer in level
            if isinstance(outer, list | dict)
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, list | dict)
        ]
        if not level:
            return False
    return True


def validate(model: type[Model], data: Mapping[str, Any]) -> Model:
    """Check ``data`` against a model, or say in one sentence what is wrong with it."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _refusal(_with_ranges(model, data, _problems(error))) from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None


def _problems(error: ValidationError) -> list[ErrorDetails]:
    return error.errors(include_url=False, include_input=False)


def _with_ranges(
    model: type[BaseModel], data: Mapping[str, Any], problems: list[ErrorDetails]
) -> list[ErrorDetails]:
    """Return the problems, of which a huge integer's, which JSON's parser reads as a float, is not
    that it is none but the range that it misses."""
    if problems[0]["type"] != "int_type":
        return problems
    try:
        model.model_validate(_whole(data))
    except ValidationError as error:
        return _problems(error)
    return [{**problems[0], "msg": f"must be between {-(2**63)} and {2**64 - 1}"}, *problems[1:]]


def _whole(value: Any) -> Any:
    """Return a JSON value whose huge floats are the integers that they are."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and abs(value) >= 2.0**63 else value


def _refusal(problems: Sequence[ErrorDetails]) -> InvalidRequestError:
    first = problems[0]
    path = field_path(first["loc"])
    if first["type"] == "unsupported":
        path = field_path((*first["loc"], str(first["ctx"]["key"])))
    others = len(problems) - 1
    more = f" ({others} more problem{'s' * (others > 1)} in the body.)" if others else ""
    return InvalidRequestError(_sentence(first, path) + more, param=path or None)


def _sentence(problem: ErrorDetails, path: str) -> str:
    kind = problem["type"]
    if kind == "missing":
        return f"{path} is required."
    if kind == "unsupported":
        return f"{path} is not supported: {problem['ctx']['why']}."
    if kind == "extra_forbidden":
        return f"Unrecognized parameter: {path}."
    if kind == "too_short":
        return f"{path} must not be empty."
    message = problem["msg"].rstrip(".")
    for theirs, ours in _WORDS:
        message = message.replace(theirs, ours, 1)
    joint = "" if message.startswith("[") else " "
    return f"{path}{joint}{message}."


def wrong(message: str) -> PydanticCustomError:
    """Return an error whose ``message`` goes on after the field's path ("must be …")."""
    return PydanticCustomError("wrong", message)


def field_path(location: Sequence[str | int]) -> str:
    """Write where a field is as clients do: ``messages[0].content``."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(BRANCH):
            path += f".{part[:MAX_KEY_CHARS]}" if path else part[:MAX_KEY_CHARS]
    return path


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
