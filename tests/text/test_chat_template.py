"""Chat templates render what transformers renders, and refuse in one sentence what they cannot."""

import warnings
from datetime import datetime

import pytest

from octavo.core.errors import InvalidRequestError, LoadError
from octavo.models.chat_template import ChatTemplate
from support_text import byte_level_metadata, tokenizer_of

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Today: " + strftime_now("%d %b %Y") + "\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
MISTRAL = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("Roles must alternate.") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " ~ message["content"] ~ "[/INST]" }}
        {%- endif %}
    {%- else %}
        {%- generation %}
        {{- " " + message["content"] + eos_token }}
        {%- endgeneration %}
        {%- if message["content"] == "stop" %}{% break %}{% endif %}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

USER = {"role": "user", "content": "  Hi <b>& é 中 </b>\n"}
ASSISTANT = {"role": "assistant", "content": "Hello!\n\n- one"}
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [USER, ASSISTANT, USER],
    [SYSTEM, USER, ASSISTANT, USER, {"role": "assistant", "content": "stop"}, USER],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é <x>", "parameters": {}}}]


def noon() -> datetime:
    return datetime(2024, 7, 26, 12)


def template(text: str, **named: str) -> ChatTemplate:
    return ChatTemplate({"default": text, **named}, SPECIAL, noon)


@pytest.mark.reference
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_rendering_equals_transformers(
    name: str, messages: list, prompt: bool, tools: list | None
) -> None:
    """Red when white space, JSON, loop controls or helpers differ from apply_chat_template."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils.chat_template_utils import render_jinja_template

        expected, _ = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=TEMPLATES[name].replace('strftime_now("%d %b %Y")', '"26 Jul 2024"'),
            add_generation_prompt=prompt,
            **SPECIAL,
        )
    ours = template(TEMPLATES[name]).render(messages, add_generation_prompt=prompt, tools=tools)
    assert ours == expected[0]


def test_the_date_is_the_clocks() -> None:
    """Red when a template's date comes from anywhere but the given clock."""
    assert "Today: 26 Jul 2024" in template(LLAMA3).render([USER])


def test_roles_that_do_not_alternate_are_the_clients_fault() -> None:
    """Red when ``raise_exception`` in a template ends in a 500, or loses its words."""
    with pytest.raises(InvalidRequestError, match="must alternate") as caught:
        template(GEMMA).render([USER, USER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"content": "no role"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"text": "x"}}],
        ["hi"],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 3}]}],
        [{"role": "user", "content": [7]}],
        [{"role": "user", "content": object()}],
        [{"role": 7, "content": "x"}],
    ],
)
def test_messages_that_do_not_fit_are_refused_in_one_sentence(messages: list) -> None:
    """Red when odd messages end in a traceback, a 500 or text such as ``None``."""
    with pytest.raises(InvalidRequestError) as caught:
        template(CHATML).render(messages)
    assert caught.value.param == "messages"
    assert "\n" not in caught.value.message
    assert caught.value.message.endswith(".")


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def test_text_parts_are_joined_for_templates_that_take_texts() -> None:
    """Red when a list of parts is shown to the model as Python or JSON text."""
    rendered = template(CHATML).render([{"role": "user", "content": PARTS}])
    assert "user\none\ntwo<|im_end|>" in rendered
    for shown in ("{{ messages[0].content }}", "{{ messages[0].content | tojson }}"):
        assert "one\\ntwo" in template(shown).render([{"role": "user", "content": PARTS}]).replace(
            "\n", "\\n"
        )
    assert "just text" in template(CHATML).render([{"role": "user", "content": ["just text"]}])


def test_text_parts_reach_templates_that_take_parts() -> None:
    """Red when a template that handles parts itself gets them joined."""
    assert "user\nonetwo<end_of_turn>" in template(GEMMA).render(
        [{"role": "user", "content": PARTS}]
    )


def test_texts_become_parts_for_templates_that_take_only_parts() -> None:
    """Red when a template that loops over parts loops over the letters of a text."""
    only_parts = "{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}"
    assert template(only_parts).render([{"role": "user", "content": "abc"}]) == "[abc]"
    assert template(only_parts).render([{"role": "user", "content": PARTS}]) == "[one][two]"


def test_named_templates() -> None:
    """Red when tools no longer choose ``tool_use``, or a lone template is not the default."""
    both = template("plain", tool_use="tools: {{ tools[0].function.name }}")
    assert both.render([USER]) == "plain"
    assert both.render([USER], tools=[]) == "plain"
    assert both.render([USER], tools=TOOLS) == "tools: f"
    assert ChatTemplate({"rag": "only"}, {}).render([USER]) == "only"


def test_variables_reach_the_template() -> None:
    """Red when ``chat_template_kwargs`` are lost, or may replace what the server sets."""
    asked = template("{{ enable_thinking }} {{ bos_token }}")
    assert asked.render([USER], enable_thinking=False) == "False <s>"
    for name in ("messages", "documents"):
        with pytest.raises(InvalidRequestError, match=f"must not set {name}"):
            asked.render([USER], **{name: "x"})


def test_a_template_cannot_change_the_messages() -> None:
    """Red when rendering one request changes what another renders."""
    messages = [{"role": "user", "content": "x", "tags": ["a"]}]
    with pytest.raises(Exception, match="not allowed"):
        template("{{ messages[0].tags.append('b') }}").render(messages)
    assert messages == [{"role": "user", "content": "x", "tags": ["a"]}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% if %}", "line 1"),
        ("a\n{{ x", "line 2"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ x | nofilter }}", "nofilter"),
        ("{% include 'x' %}", "cannot use other templates"),
        ("{% import 'x' as y %}", "cannot use other templates"),
        ("{% from 'x' import y %}", "cannot use other templates"),
        ("{% extends 'x' %}", "cannot use other templates"),
        ("{% generation %}x", "error in line"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "nested too deep"),
    ],
)
def test_broken_templates_stop_the_load(text: str, message: str) -> None:
    """Red when a template with an error is found out by the first client."""
    with pytest.raises(LoadError, match=message) as caught:
        template(text)
    assert "\n" not in caught.value.message


def test_templates_of_a_gguf_file() -> None:
    """Red when a file's named templates or its special tokens do not reach the template."""
    tokenizer = tokenizer_of(
        {
            **byte_level_metadata(),
            "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}",
            "tokenizer.chat_template.tool_use": "with tools",
            "tokenizer.chat_templates": ["tool_use"],
        }
    )
    assert tokenizer.render_chat([USER]) == "<|endoftext|><|im_end|>"
    assert tokenizer.render_chat([USER], tools=TOOLS) == "with tools"
