"""A template from a model's files can neither break out nor run away."""

from collections.abc import Iterable

import pytest
from jinja2.exceptions import SecurityError

from octavo.core.errors import GenerationError, InvalidRequestError, LoadError
from octavo.models import chat_template_sandbox as sandbox
from octavo.models.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi", "meta": {"a": [1]}}]


def render(text: str, messages: Iterable = MESSAGES) -> str:
    return ChatTemplate({"default": text}, {}).render(list(messages))


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__globals__['os'].system('id') }}",
        "{{ strftime_now.__closure__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__ }}",
        "{{ ('{0.__class__}').format(1) }}",
        "{{ '{0.__class__}'.format_map({'0': 1}) }}",
        "{{ messages[0]['content'] | attr('__class__') }}",
        "{{ [1] | map(attribute='__class__') | list }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(x=1) }}",
        "{{ messages[0].meta.a.pop() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__init__=1) }}",
        "{{ messages.sort.__self__ }}",
    ],
)
def test_escapes_are_refused(text: str) -> None:
    """LO-07: red when a template reaches Python's internals or changes its inputs."""
    try:
        rendered = render(text)
    except (GenerationError, InvalidRequestError) as error:
        rendered = error.message
    assert "\n" not in rendered
    assert not any(word in rendered for word in ("<class", "uid=", "<built-in", "0x"))
    assert MESSAGES == [{"role": "user", "content": "hi", "meta": {"a": [1]}}]


def test_an_escape_is_not_the_clients_fault() -> None:
    """LO-07: red when a template's attack is reported as a wrong request."""
    with pytest.raises(GenerationError, match="not allowed") as caught:
        render("{{ ''.__class__.__mro__ }}")
    assert isinstance(caught.value.__cause__, SecurityError)


NEST = "{% for a in range(9999) %}{% for b in X %}{% endfor %}{% endfor %}"
GROW = "{% set n = namespace(x=9, s='x') %}{% for i in range(99) %}{% set Y %}{% endfor %}"
RUNAWAYS = [
    "{% for i in range(1000000000) %}{% endfor %}",
    NEST.replace("X", "range(9999)"),
    NEST.replace("X", "range(9999) | map('string')"),
    "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for a in [[range(99999)]*9]*9 recursive %}{{ loop(a) if a is iterable }}{% endfor %}",
    "{% for a in [[1]] recursive %}{{ loop([a]) }}{% endfor %}",
    "{{ 'x' * 10000000000 }}",
    "{{ 10000000000 * 'x' }}",
    "{{ [1] * 10000000000 }}",
    "{{ 9 ** 99999999 }}",
    GROW.replace("Y", "n.x = n.x * n.x"),
    GROW.replace("Y", "n.s = n.s + n.s"),
    GROW.replace("Y", "n.s = n.s ~ n.s"),
    "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "{{ 'x' | center(10000000000) }}",
    "{{ messages | batch(10000000000, 1) | list }}",
    "{{ 'x'.ljust(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ '{:10000000000}'.format(1) }}",
]


@pytest.mark.parametrize("text", RUNAWAYS)
def test_runaway_templates_are_stopped(text: str) -> None:
    """LO-07: red when a template can hang the server or eat its memory."""
    with pytest.raises(InvalidRequestError, match="cannot render") as caught:
        render(text)
    assert "\n" not in caught.value.message


def test_every_rendering_has_its_own_budget() -> None:
    """Red when long-lived servers run out of steps."""
    template = ChatTemplate({"default": "{% for i in range(9000) %}{% endfor %}ok"}, {})
    for _ in range(sandbox.MAX_STEPS // 9000 + 2):
        assert template.render(MESSAGES) == "ok"


def test_limits_leave_loops_as_they_are() -> None:
    """Red when counting turns breaks ``loop.last``, ``loop.length``, filters or dicts."""
    assert (
        render("{% for x in 'ab' %}{{ loop.index }}/{{ loop.length }} {% endfor %}") == "1/2 2/2 "
    )
    assert render("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}") == "a1"
    text = "{% for x in [1,2,3] | select('odd') %}{{ x }}{{ '.' if loop.last }}{% endfor %}"
    assert render(text) == "13."
    assert render("{{ 99999999999 % 99999999998 }}{{ '%d 5' % 4 }}") == "14 5"
    digits = [{"role": "user", "content": "call 12345678901"}]
    assert render("{{ messages[0].content.split(' ')[1] | indent(2) }}", digits) == "12345678901"
    assert render("{% for x in missing %}x{% else %}none{% endfor %}") == "none"
    tree = "{% for x in [[1,[2]],3] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
    assert render(tree) == "123"
    assert render("{{ 'a' ~ 1 ~ none }}{{ 2 ** 10 }}{{ 'ab' * 2 }}{{ [1] + [2] }}") == (
        "a1None1024abab[1, 2]"
    )


def test_a_template_needs_a_budget() -> None:
    """Red when someone renders a compiled template without its limits."""
    compiled = sandbox.TemplateSandbox(lambda: None).compile_template(
        "{% for i in [1] %}{% endfor %}"
    )
    with pytest.raises(SecurityError, match="budget"):
        compiled.render()


def test_no_text_is_no_template() -> None:
    """Red when an empty set of templates is found out by the first client."""
    with pytest.raises(LoadError):
        ChatTemplate({}, {})
