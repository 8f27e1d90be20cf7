"""Chat templates render as their authors expect, and fail as the client's error."""

from __future__ import annotations

import pytest

from ftserve.engine.errors import InvalidRequestError
from ftserve.preprocess.chat import ChatTemplate, shows_parts

CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + eos_token }}"
    "\n{% endfor %}\n{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello <b>"}]


def test_messages_and_special_tokens_are_rendered() -> None:
    template = ChatTemplate(CHATML, {"eos_token": "<|im_end|>"})
    assert template.render(HELLO) == "<|im_start|>user\nHello <b><|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HELLO, add_generation_prompt=False) == "<|im_start|>user\nHello <b><|im_end|>\n"


def test_tojson_does_not_escape_html() -> None:
    assert ChatTemplate("{{ messages[0] | tojson }}", {}).render(HELLO) == '{"role": "user", "content": "Hello <b>"}'


def test_loop_controls_and_generation_tags_work() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert ChatTemplate(source, {}).render(HELLO * 2) == "Hello <b>"


def test_template_kwargs_reach_the_template_and_reserved_names_do_not() -> None:
    template = ChatTemplate("{{ enable_thinking }}", {})
    assert template.render(HELLO, kwargs={"enable_thinking": False}) == "False"
    with pytest.raises(InvalidRequestError, match="'messages'"):
        template.render(HELLO, kwargs={"messages": []})


def test_a_refusal_by_the_template_is_the_clients_error_with_its_message() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(HELLO)


@pytest.mark.parametrize("source", ["{{ messages[5].content.x }}", "{{ ().__class__.__mro__ }}", "{{ 1 / 0 }}"])
def test_a_failure_inside_the_template_is_the_clients_error(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source, {}).render(HELLO)


def test_a_template_that_does_not_compile_is_an_operators_error() -> None:
    with pytest.raises(ValueError, match="line 1"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    ("source", "shows"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", False),
        ("{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for part in m.content | list %}{{ part }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m.content %}{% for part in c %}{{ part }}{% endfor %}{% endfor %}", True),
        ("{% macro f(content) %}{% for part in content %}{{ part }}{% endfor %}{% endmacro %}{{ f('x') }}", True),
        (
            "{% for m in messages %}{% for call in m.tool_calls %}{{ call }}{% endfor %}{{ m.content }}{% endfor %}",
            False,
        ),
    ],
)
def test_a_template_that_goes_through_parts_is_told_by_its_loops(source: str, shows: bool) -> None:
    assert shows_parts(source) is shows
