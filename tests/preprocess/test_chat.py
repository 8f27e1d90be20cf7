"""Chat templates render as their authors expect, and fail as the client's error."""

from __future__ import annotations

import pytest

from ftserve.engine.errors import InvalidRequestError
from ftserve.preprocess import chat
from ftserve.preprocess.chat import ChatTemplate, shows_parts
from ftserve.preprocess.template_sandbox import TemplateSandbox

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


def test_a_final_message_can_be_continued() -> None:
    template = ChatTemplate(CHATML, {"eos_token": "<|im_end|>"})
    messages = [*HELLO, {"role": "assistant", "content": "Yes, "}]
    assert template.render(messages, continue_final=True).endswith("<|im_start|>assistant\nYes, ")
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    listing = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    assert ChatTemplate(listing, {}).render(parts, continue_final=True) == "[a][b"


@pytest.mark.parametrize(
    ("source", "last"),
    [("{{ messages[-1].content[:3] }}", "Yes, "), (CHATML, None), (CHATML, [{"type": "image"}])],
)
def test_a_final_message_that_does_not_end_the_text_cannot_be_continued(source: str, last: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(source, {}).render([*HELLO, {"role": "assistant", "content": last}], continue_final=True)
    assert caught.value.param == "messages"


def test_documents_reach_the_template() -> None:
    template = ChatTemplate("{% for d in documents %}{{ d.title }},{% endfor %}", {})
    assert template.render(HELLO, documents=[{"title": "a"}, {"title": "b"}]) == "a,b,"


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source", [ENDLESS, "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}"]
)
def test_a_template_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(chat, "_MAX_RENDER_S", 0.05)
    with pytest.raises(InvalidRequestError, match="takes more than"):
        ChatTemplate(source, {}).render(HELLO)


def test_ticks_change_nothing_that_a_loop_sees() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% else %}-{% endfor %}"
    )
    assert ChatTemplate(source, {}).render(HELLO * 3) == "1/3,2/3,3/3"
    assert ChatTemplate(source, {}).render([]) == "-"


def test_a_requests_template_is_rendered_elsewhere_and_within_limits() -> None:
    sandbox = TemplateSandbox({"eos_token": "<e>"})
    try:
        assert sandbox.render(CHATML, HELLO, add_generation_prompt=False) == "<|im_start|>user\nHello <b><e>\n"
        for source in (
            "{% if %}",
            "{{ raise_exception('no') }}",
            "{{ range(3) | slice(10**9) | list }}",  # no loop of ours that could look at the clock
            "{{ 'x' * 10**10 }}",
            "{% set ns = namespace(x='x') %}{% for _ in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        ):
            with pytest.raises(InvalidRequestError) as caught:
                sandbox.render(source, HELLO)
            assert caught.value.param == "chat_template"
        assert sandbox.render("{{ messages | length }}", HELLO * 2) == "2"
    finally:
        sandbox.close()
