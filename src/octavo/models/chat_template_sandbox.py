"""A Jinja environment in which a model's chat template can neither break out nor run away.

A template comes with a model's files, so it is code by strangers. It runs in Jinja's immutable
sandbox; there is nothing to include or import; and what one rendering may loop, call and write is
bounded.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import datetime
from functools import wraps
from inspect import unwrap
from types import BuiltinMethodType
from typing import Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS: Final = 300_000
"""Most loop turns in one rendering: about a second, or thousands of messages."""
CALL_STEPS: Final = 5
"""Loop turns that a call counts for."""
MAX_TEXT: Final = 16 * 2**20
"""Most characters of a text, or items of a list, that a template may build."""
MAX_INTEGER_BITS: Final = 4096

_PADDING_FILTERS: Final = ("center", "indent", "batch", "slice")
_LONG_NUMBER: Final = re.compile(r"\d{8,}")
_BUDGET: Final = "rendering budget"  # not an identifier, so no template can name it
_OTHER_FILES: Final = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class TemplateLimitError(TemplateError):
    """A rendering wanted more than its share of steps or memory."""


class Budget:
    """Steps that one rendering has left."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self._steps = steps

    def spend(self, steps: int) -> None:
        """Take ``steps`` from what is left; TemplateLimitError if there are not as many."""
        self._steps -= steps
        if self._steps < 0:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS:,} steps")


def budget_variables() -> dict[str, object]:
    """Return what a rendering must be given besides the template's own variables."""
    return {_BUDGET: Budget()}


def _budget(context: Context) -> Budget:
    budget = context.parent.get(_BUDGET)
    if not isinstance(budget, Budget):
        raise SecurityError("a template must be rendered with a budget")
    return budget


@pass_context
def _limit_loop(context: Context, items: object) -> object:
    """Charge a loop's turns: ahead where they can be counted, else one by one."""
    budget = _budget(context)
    if isinstance(items, Sized):
        budget.spend(len(items))
        return items
    if isinstance(items, Iterable):
        return _charged(items, budget)
    return items


def _charged(items: Iterable[object], budget: Budget) -> Iterator[object]:
    for item in items:
        budget.spend(1)
        yield item


def _limit_text(text: object) -> object:
    if isinstance(text, Sized) and len(text) > MAX_TEXT:
        raise TemplateLimitError(f"it builds a text longer than {MAX_TEXT:,}")
    return text


class _GenerationTag(Extension):
    """Renders ``{% generation %}`` blocks, which mark what a model is trained on, as they are."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's protocol)

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn the block into a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PlainNamespace(Namespace):
    """A namespace without names that lead to Python's internals."""

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles chat templates as Hugging Face's transformers does, with limits added."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        for name in _PADDING_FILTERS:
            self.filters[name] = _limit_padding(self.filters[name])
        self.filters["format"] = _limit_format
        self.filters["tojson"] = _to_json
        self.filters[_limit_loop.__name__] = _limit_loop
        self.filters[_limit_text.__name__] = _limit_text
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        self.globals["namespace"] = _PlainNamespace

    def compile_template(self, source: str) -> Template:
        """Compile; TemplateSyntaxError if the source is wrong or wants other files."""
        tree = self.parse(source)
        if other := next(iter(tree.find_all(_OTHER_FILES)), None):
            raise TemplateSyntaxError("it cannot use other templates", other.lineno)
        for loop in tree.find_all(nodes.For):
            loop.iter = self._filtered(loop.iter, _limit_loop.__name__)
        _wrap_joins(tree, lambda node: self._filtered(node, _limit_text.__name__))
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def call(self, context: Context, obj: object, /, *args: object, **kwargs: object) -> object:
        """Call on a template's behalf: its steps, and one for each item handed over."""
        items = sum(len(arg) for arg in args if isinstance(arg, list | tuple | dict | range))
        _budget(context).spend(CALL_STEPS + items)
        method = unwrap(obj) if callable(obj) else obj  # the sandbox wraps str.format
        if isinstance(method, BuiltinMethodType) and isinstance(method.__self__, str):
            _check_widths((*args, *kwargs.values()))
            if method.__name__ in ("format", "format_map"):
                _check_format(method.__self__)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Compute on a template's behalf, unless the result would be huge."""
        if operator == "+":
            return _limit_text(super().call_binop(context, operator, left, right))
        if operator == "*":
            _check_product(left, right)
        elif operator == "%":
            _check_format(left)
        elif isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        return super().call_binop(context, operator, left, right)

    def _filtered(self, node: nodes.Node, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _wrap_joins(node: nodes.Node, wrap: Callable[[nodes.Expr], nodes.Expr]) -> None:
    """Wrap every ``~`` below ``node``: the one way to join texts that no hook sees."""
    for child in list(node.iter_child_nodes()):
        _wrap_joins(child, wrap)
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, name, [wrap(v) if isinstance(v, nodes.Concat) else v for v in value])
        elif isinstance(value, nodes.Concat):
            setattr(node, name, wrap(value))


def _check_product(left: object, right: object) -> None:
    for many, times in ((left, right), (right, left)):
        if isinstance(times, int):
            if isinstance(many, int):
                _check_bits(many.bit_length() + times.bit_length())
            elif isinstance(many, Sized) and len(many) * times > MAX_TEXT:
                raise TemplateLimitError(f"it builds a text longer than {MAX_TEXT:,}")


def _check_widths(values: Iterable[object]) -> None:
    """Refuse numbers that would pad a text beyond all bounds."""
    if any(isinstance(value, int) and value > MAX_TEXT for value in values):
        raise TemplateLimitError(f"it asks for a width above {MAX_TEXT:,}")


def _check_format(text: object) -> None:
    """Refuse a format with such a number in it."""
    if isinstance(text, str) and _LONG_NUMBER.search(text):
        raise TemplateLimitError(f"it asks for a width above {MAX_TEXT:,}")


def _limit_padding(function: Callable[..., object]) -> Callable[..., object]:
    @wraps(function)
    def limited(value: object, *args: object, **kwargs: object) -> object:
        _check_widths((*args, *kwargs.values()))
        return function(value, *args, **kwargs)

    return limited


def _limit_format(value: object, *args: object, **kwargs: object) -> str:
    _check_format(value)
    return do_format(str(value), *args, **kwargs)


def _check_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it computes a number of more than {MAX_INTEGER_BITS} bits")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it is, without the escapes for HTML that Jinja's own filter adds."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))
