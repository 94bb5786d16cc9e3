"""Chat templates render as transformers renders them, say why when they cannot, and cannot escape."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_data import transformers_oracle, unpacked

from cairn.core.errors import RequestError, TokenizerError
from cairn.models import template_sandbox
from cairn.models.chat_template import ChatTemplates, plain

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
HI = [{"role": "user", "content": "Hi"}]


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def tool_result(content, call):
    return {"role": "tool", "name": "get_weather", "tool_call_id": call["id"], "content": content}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather <now> in a "city" & é',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name"},
                    "days": {"type": "integer", "enum": [1, 2]},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "noop",
            "description": "-",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]


def call(arguments, id="abcdefghi"):
    return {
        "id": id,
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }


CALL = call({"city": "Zürich"})
CALL_AS_TEXT = call(json.dumps({"city": "Zürich"}))
SYSTEM = {"role": "system", "content": "Be brief."}

CONVERSATIONS: dict[str, dict] = {
    "one user": dict(messages=HI),
    "no generation prompt": dict(messages=HI, add_generation_prompt=False),
    "dialogue": dict(messages=[SYSTEM, *HI, assistant("Hello"), user("How are you?")]),
    "finished dialogue": dict(messages=[*HI, assistant("Hello")], add_generation_prompt=False),
    "tools": dict(messages=[user("Weather?")], tools=TOOLS),
    "system and tools": dict(messages=[SYSTEM, user("Weather?")], tools=TOOLS),
    "tool call": dict(
        messages=[user("W?"), assistant("", tool_calls=[CALL]), tool_result("sunny", CALL)],
        tools=TOOLS,
    ),
    "tool call as text": dict(
        messages=[
            user("W?"),
            assistant(None, tool_calls=[CALL_AS_TEXT]),
            tool_result('{"t": 3}', CALL),
            assistant("It is 3"),
            user("ok"),
        ],
        tools=TOOLS,
    ),
    "two calls": dict(
        messages=[
            user("W?"),
            assistant("Let me see.", tool_calls=[CALL, {**CALL, "id": "bcdefghij"}]),
            tool_result("sunny", CALL),
            tool_result("rain", {"id": "bcdefghij"}),
        ],
        tools=TOOLS,
    ),
    "parts": dict(
        messages=[user([{"type": "text", "text": "What"}, {"type": "text", "text": " is it?"}])]
    ),
    "image": dict(messages=[user([{"type": "image"}, {"type": "text", "text": " is it?"}])]),
    "thinking on": dict(messages=HI, enable_thinking=True),
    "thinking off": dict(messages=HI, enable_thinking=False),
    "thought in text": dict(
        messages=[*HI, assistant("<think>\nhm\n</think>\n\nHello"), user("More")]
    ),
    "reasoning": dict(
        messages=[
            *HI,
            assistant("Hello", reasoning_content="because"),
            user("More"),
            assistant("x", reasoning="r2", tool_calls=[CALL]),
            tool_result("s", CALL),
        ],
        tools=TOOLS,
    ),
    "unicode": dict(messages=[user("日本語 😀 ñ <b>&\"'\n\t")]),
    "documents": dict(messages=HI, documents=[{"title": "T", "text": "body"}]),
    "settings": dict(
        messages=HI,
        date_string="01 Jan 2025",
        reasoning_effort="low",
        builtin_tools=["code_interpreter"],
    ),
    "assistant first": dict(messages=[assistant("Hello"), user("x"), user("y")]),
    "unknown role": dict(messages=[{"role": "wizard", "content": "z"}]),
    "developer": dict(messages=[{"role": "developer", "content": "z"}, user("q")]),
}


class Noon(datetime):
    """A clock that stands still, for templates that print the date."""

    @classmethod
    def now(cls, tz=None):
        return cls(2025, 3, 9, 12, 0, 0, tzinfo=tz)


def test_all_real_templates_render_as_in_transformers(monkeypatch):
    transformers_oracle()
    from transformers.utils import chat_template_utils as oracle

    monkeypatch.setattr(oracle, "datetime", Noon)
    monkeypatch.setattr(template_sandbox, "datetime", Noon)
    folder = (
        unpacked("data", "tokenizers", "llamacpp_vectors_and_templates.tar.xz") / "chat_templates"
    )
    files = sorted(folder.glob("*.jinja"))
    assert len(files) == 68
    rendered = refused = 0
    for file in files:
        source = file.read_text(encoding="utf-8")
        templates = ChatTemplates({"default": source}, SPECIAL, file.stem)
        for name, given_ in CONVERSATIONS.items():
            arguments = {"add_generation_prompt": True, **SPECIAL, **given_}
            messages = arguments.pop("messages")
            want, failure = oracle_renders(oracle, source, messages, arguments)
            if failure is None:
                assert templates.render(messages, **arguments) == want, (file.stem, name)
                rendered += 1
            else:
                with pytest.raises(TokenizerError) as raised:
                    templates.render(messages, **arguments)
                assert failure in raised.value.message, (file.stem, name)
                refused += 1
    assert rendered + refused == 68 * len(CONVERSATIONS)
    assert rendered > 1200  # most templates can render most conversations


def oracle_renders(oracle, source: str, messages, arguments) -> tuple[str, str | None]:
    """What transformers makes of it: a text, or the message of whatever it raises."""
    try:
        (text,), _ = oracle.render_jinja_template([messages], chat_template=source, **arguments)
    except Exception as error:  # noqa: BLE001  templates raise all kinds
        return "", str(error)
    return text, None


def render(source: str, messages=HI, **variables) -> str:
    return ChatTemplates({"default": source}, SPECIAL, "toy").render(messages, **variables)


# ---- what templates can use ----------------------------------------------------------------------------------------


def test_special_tokens_are_variables():
    assert (
        render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ sep_token }}")
        == "<s>Hi</s>"
    )


def test_blocks_leave_no_blank_lines():
    assert (
        render(
            "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}"
        )
        == "user\n"
    )


def test_tojson_writes_real_characters():
    assert render("{{ x | tojson }}", x={"é": "<a & 'b'>"}) == '{"é": "<a & \'b\'>"}'
    assert (
        render("{{ x | tojson(indent=1, sort_keys=true) }}", x={"b": 1, "a": 2})
        == '{\n "a": 2,\n "b": 1\n}'
    )
    assert render("{{ x | tojson(separators=(',', ':')) }}", x=[1, {"a": None}]) == '[1,{"a":null}]'


def test_generation_tag_and_loop_controls():
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{% generation %}{% set inner = 1 %}{{ m.content }}{{ loop.index }}{% endgeneration %}"
        "{% if m.content == 'stop' %}{% break %}{% endif %}{% endfor %}{{ inner }}"
    )
    messages = [user("a"), {"role": "tool", "content": "no"}, user("stop"), user("never")]
    assert render(source, messages) == "a1stop3"


def test_strftime_now(monkeypatch):
    monkeypatch.setattr(template_sandbox, "datetime", Noon)
    assert render("{{ strftime_now('%d %b %Y') }}") == "09 Mar 2025"


def test_namespace_and_dict():
    assert (
        render(
            "{% set ns = namespace(n=1, self=5) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ ns.self }}"
        )
        == "25"
    )
    assert render("{{ dict(a=1).a }}{{ dict.fromkeys(['x'], 2).x }}") == "12"


def test_generation_prompt_is_asked_for_by_default():
    source = "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    assert render(source) == "Hi>"
    assert render(source, add_generation_prompt=False) == "Hi"


def test_arguments_cannot_be_overwritten_by_variables():
    templates = ChatTemplates({"default": "{{ messages | length }}{{ bos_token }}"}, SPECIAL, "toy")
    assert templates.render(HI, bos_token="<other>") == "1<other>"


# ---- choosing ------------------------------------------------------------------------------------------------------


def test_the_template_for_tools_is_chosen_when_tools_are_given():
    templates = ChatTemplates({"default": "D", "tool_use": "T", "rag": "R"}, {}, "toy")
    assert templates.render(HI) == "D"
    assert templates.render(HI, tools=TOOLS) == "T"
    assert templates.render(HI, tools=TOOLS, template="rag") == "R"
    assert ChatTemplates({"default": "D"}, {}, "toy").render(HI, tools=TOOLS) == "D"


def test_choosing_what_is_not_there():
    with pytest.raises(TokenizerError, match="no chat template named 'default'") as raised:
        ChatTemplates({"a": "A", "b": "B"}, {}, "toy").render(HI)
    assert "a, b" in (raised.value.hint or "")
    with pytest.raises(TokenizerError, match="toy has no chat template") as raised:
        ChatTemplates({}, {}, "toy").render(HI)
    assert "--chat-template FILE" in (raised.value.hint or "")


# ---- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages is NoneType"),
        ("Hi", "messages is str"),
        ({}, "messages is dict"),
        ([], "messages is empty"),
        (["Hi"], r"messages\[0\] is str"),
        ([{}], r"messages\[0\].role is None"),
        ([{"content": "Hi"}], r"messages\[0\].role is None"),
        ([*HI, {"role": 3, "content": "x"}], r"messages\[1\].role is 3"),
        ([{"role": "user", "content": 7}], r"messages\[0\].content is int"),
        ([{"role": "user", "content": [b"x"]}], r"messages\[0\].content\[0\] is bytes"),
        (
            [{"role": "user", "content": "x", "extra": {"a": {1, 2}}}],
            r"messages\[0\].extra.a is set",
        ),
    ],
)
def test_conversations_that_are_none(messages, message):
    with pytest.raises(RequestError, match=message):
        render("{{ messages }}", messages)


def test_conversations_without_a_bottom():
    value: list = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(RequestError, match="nested"):
        render("x", [{"role": "user", "content": value}])


def test_tools_and_documents_are_objects():
    with pytest.raises(RequestError, match=r"tools\[0\] is function"):
        render("x", tools=[lambda: None])
    with pytest.raises(RequestError, match="documents is str"):
        render("x", documents="text")


def test_an_answer_may_have_no_content():
    assert (
        render("{{ messages[1].content is none }}", [*HI, {"role": "assistant", "tool_calls": []}])
        == "False"
    )
    assert render("{{ messages[1].content is none }}", [*HI, assistant(None)]) == "True"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[9].content }}", "has no element 9"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ undefined_thing | tojson }}", "not JSON serializable"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "RecursionError"),
        ("{{ x | no_such_filter }}", "no_such_filter"),
        ("{% if %}", "line 1"),
        ("\n\n{% for x in %}", "line 3"),
        ("{{ " + "(" * 300 + ")" * 300 + " }}", "does not compile"),
        ("{{ " + "9" * 5000 + " }}", "does not compile"),
        ("{% include 'file' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
    ],
)
def test_a_failing_template_says_why(source, message):
    with pytest.raises(TokenizerError, match=message) as raised:
        render(source)
    assert "toy" in raised.value.message


# ---- the sandbox ---------------------------------------------------------------------------------------------------

ESCAPES = [
    "{{ messages.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages[0]['__class__'].__name__ }}",
    "{{ messages | attr('__class__') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ range.__closure__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ dict.__class__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__}'.format_map({'0': 1}) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace(__init__=1) }}",
    "{{ namespace({'_x': 1}) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages.clear() }}",
    "{% set ns = namespace(l=[]) %}{{ ns.l.append(1) }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_reach_python_or_change_its_input(source):
    messages = [dict(HI[0])]
    try:
        text = render(source, messages)
    except TokenizerError:
        text = ""
    assert text in ("", "None")  # an attribute that does not exist prints nothing
    assert messages == HI


class Role(StrEnum):
    USER = "user"


class Settings(Mapping):
    """A mapping that is no dict, with a method that a template must not find."""

    def __getitem__(self, key):
        return {"a": 1}[key]

    def __iter__(self):
        return iter(["a"])

    def __len__(self):
        return 1

    def secret(self):
        return "secret"


def test_only_plain_values_reach_the_template():
    assert type(plain(Role.USER, "x")) is str
    assert plain((True, 1.5, None), "x") == [True, 1.5, None]
    assert render("{{ s.secret is defined }}{{ s.a }}", s=Settings()) == "False1"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(value=JSON)
def test_plain_is_an_equal_copy_of_json(value):
    assert plain(value, "x") == value
    assert render("{{ x | tojson }}", x=value) == json.dumps(value, ensure_ascii=False)


@given(text=st.text(max_size=60))
def test_any_source_renders_or_is_a_tokenizer_error(text):
    with contextlib.suppress(TokenizerError):
        ChatTemplates({"default": text}, {}, "toy").render(HI)


def test_jinja_is_not_loaded_before_the_first_chat():
    code = (
        "import sys, cairn.models.tokenizer; print('jinja2' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
