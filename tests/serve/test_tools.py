"""Tool calls in four formats: found in any cut of the text, and content where they are none."""

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cairn.core.errors import RequestError
from cairn.serve.http.tools.tool_parser import parse_all, tool_parser
from cairn.serve.http.tools.tools import format_of, new_call_id, read_tools

FORMATS = ("hermes", "llama3", "mistral", "json")
NAMES = ("f", "get_weather", "a.b-c")
F = '{"name": "f", "arguments": {"x": 1}}'
ONE = [("f", '{"x": 1}')]


def parse(format, pieces):
    return parse_all(tool_parser(format, NAMES), pieces)


WEATHER = '{"city": "K\\u00f6ln \\"am\\" Rhein", "days": [1, {"a": null}], "e": "}]</tool_call>"}'
WHOLE = [
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
     "", [("get_weather", WEATHER)]),
    ("hermes", 'Let me see.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>\n'
     '{"arguments": {"x": 1 }, "name": "f"}</tool_call>\n', "Let me see.", [("f", "{}"), ("f", '{"x": 1 }')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call> ok', "ok", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    # No calls: content, character by character.
    ("hermes", 'a\n<tool_call>{"nam": 1}</tool_call>', 'a\n<tool_call>{"nam": 1}</tool_call>', []),
    ("hermes", "<tool_call>f(1)</tool_call> b", "<tool_call>f(1)</tool_call> b", []),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
     '<tool_call>{"name": 3, "arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
    ("hermes", "x <tool", "x <tool", []),
    ("hermes", "  plain  ", "  plain  ", []),
    # A good one behind a bad one.
    ("hermes", '<tool_call>{]</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>',
     "<tool_call>{]</tool_call>", [("f", "{}")]),
    # The closing mark is missing.
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "f", "arguments": {}}', "",
     [("f", "{}"), ("f", "{}")]),
    # Cut by max_tokens, or broken within the arguments: they are what the model wrote.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": [1, 2', "", [("f", '{"x": [1, 2')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": ]}}</tool_call>b', "b", [("f", '{"x": ]}}')]),
    ("llama3", f'{{"name": "get_weather", "parameters": {WEATHER}}}', "", [("get_weather", WEATHER)]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"x": 1}}', "",
     [("f", "{}"), ("f", '{"x": 1}')]),
    ("llama3", ' {"type": "function", "name": "f", "parameters": {"y": 2}} Done.', " Done.", [("f", '{"y": 2}')]),
    ("llama3", '{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}', []),
    ("llama3", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3", 'Use {"name": "f", "parameters": {}}', 'Use {"name": "f", "parameters": {}}', []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "f", "arguments": {{}}}}]',
     "", [("get_weather", WEATHER), ("f", "{}")]),
    ("mistral", f"Sure.[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]f[CALL_ID]a1[ARGS]{{}}", "Sure.",
     [("get_weather", WEATHER), ("f", "{}")]),
    ("mistral", '[TOOL_CALLS]f{"x": 1}', "", [("f", '{"x": 1}')]),
    ("mistral", "[TOOL_CALLS] nothing here", "[TOOL_CALLS] nothing here", []),
    ("mistral", "[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] [1, 2]", []),
    ("mistral", "[TOOL_CA", "[TOOL_CA", []),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": ', "", [("f", '{"x": ')]),
]  # fmt: skip
# JSON that names an offered tool is a call in both formats, with or without marks.
JSON_CALLS = [
    (F, "", ONE),
    (f"\n {F}\n", "", ONE),
    (f"{{{F}}}", "", ONE),  # as the template of a well-known GGUF shows it
    (f"{{ {F} }} ok", "ok", ONE),
    (f"[{F}, {F}]", "", ONE * 2),
    (f"{F}\n{F}; {F}", "", ONE * 3),
    (f"I look.\n\n{F}", "I look.", ONE),
    (f"I look.\n{F}\nDone.", "I look.Done.", ONE),
    (f"<tools>\n{F}\n</tools>", "", ONE),
    (f"a <function_call>{F}</function_call> b", "ab", ONE),
    (f"<tool_calls>[{F}, {F}]</tool_calls>", "", ONE * 2),
    (f"<tool_call>{F}\n{F}</tool_call>", "", ONE * 2),
    (f"<tool_call>{{{F}}}</tool_call>", "", ONE),
    (f"```json\n{F}\n```", "", ONE),
    (f"```\n{F}\n{F}\n```", "", ONE * 2),
    (f"So:\n```xml\n<tool_call>\n{F}\n</tool_call>\n```\nDone.", "So:Done.", ONE),
    ('<function=f>{"x": 1}</function>', "", ONE),
    ('<tool_call>\n<function=f>\n{"x": 1}</function>\n</tool_call>', "", ONE),
    (f"<tool_call>{F} and so on</tool_call>.", "and so on.", ONE),
    ('{"name": "f", "arguments": {"x": ', "", [("f", '{"x": ')]),
]  # fmt: skip
# Text that merely looks like it, or that names no offered tool.
NO_CALLS = [
    '{"city": "Paris", "days": 2}', '{"name": "Bob", "arguments": {"x": 1}}', "{", "{{ name }}", "[1, 2]", "{}", "[]",
    '{"name": "f"', '{"name": "f", "description": "?", "arguments": {}}', '{"a": {"name": "f", "arguments": {}}}',
    '[\n  {"name": "Bob"},\n  {"name": "f", "arguments": {}}\n]', f"Write {F} to call.",
    f"```python\nx = 1\n{F}\n```\nDone.", f"```js\n[{F}]\n```", "`a` and ``b`` and ```c```", "```json\n[1]\n```", "``",
    "```",
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "<tools>f</tools>", "<function=g>{}</function>", "<function=f", "a < b > c", "x\n[link](y)\n{z}\n", "<tool_call>",
    "</tool_call> </tools>", "\n{\n{\n[",
]  # fmt: skip
WHOLE += [(format, *case) for format in ("hermes", "json") for case in JSON_CALLS]
WHOLE += [(format, text, text, []) for format in ("hermes", "json") for text in NO_CALLS]
UNKNOWN = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
WHOLE += [("hermes", UNKNOWN, "", [("g", "{}")]), ("json", UNKNOWN, UNKNOWN, [])]


@pytest.mark.parametrize(("format", "text", "content", "calls"), WHOLE)
def test_a_whole_answer_and_the_same_by_characters(format, text, content, calls):
    assert parse(format, [text]) == (content, calls)
    assert parse(format, list(text)) == (content, calls)
    for at in range(len(text)):
        assert parse(format, [text[:at], text[at:]]) == (content, calls)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["</tool_call>", '"}]', "\\"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=5), values, max_size=4)
indents = st.sampled_from([None, 2])


def written(format, calls, indent, content):
    key = "parameters" if format == "llama3" else "arguments"
    texts = [json.dumps(given, indent=indent, ensure_ascii=False) for _, given in calls]
    objects = [
        f'{{"name": {json.dumps(name)}, "{key}": {text}}}'
        for (name, _), text in zip(calls, texts, strict=True)
    ]
    if format == "json":
        text = content + "\n" * bool(content) + "\n".join(objects)
    elif format == "hermes":
        text = content + "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    elif format == "llama3":
        text = "; ".join(objects)
    else:
        text = f"{content}[TOOL_CALLS][{', '.join(objects)}]"
    return text, [(name, text) for (name, _), text in zip(calls, texts, strict=True)]


def cut(text, places):
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@settings(max_examples=120, deadline=None)
@given(
    format=st.sampled_from(FORMATS),
    calls=st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3),
    indent=indents,
    places=st.lists(st.integers(0, 10_000), max_size=12),
    content=st.sampled_from(["", "Let me look."]),
)
def test_calls_come_back_as_they_were_written(format, calls, indent, places, content):
    text, expected = written(format, calls, indent, content)
    said = content if format != "llama3" else ""
    assert parse(format, cut(text, places)) == (said, expected)
    assert parse(format, list(text)) == (said, expected)
    for (_, found), (_, meant) in zip(expected, calls, strict=True):
        assert json.loads(found) == meant


PARTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", '"', "{", "}", "[", "]",
    ",", ";", ":", "\\", "f", "<", "null", "é", '{"name":"f",', '"arguments":{', '"parameters":{"x":1}',
    '{"name":"f","arguments":{}}', "\n", " ", "```", "json", "<tools>", "</tools>", "<function=f>", "</function>",
]  # fmt: skip
fragments = st.lists(st.sampled_from(PARTS), max_size=10)


@settings(max_examples=400, deadline=None)
@given(
    format=st.sampled_from(FORMATS),
    words=fragments,
    places=st.lists(st.integers(0, 10_000), max_size=8),
)
@example(
    "hermes", ["<tool_call>", '{"name":"f",', '"arguments":{', "]", "</tool_call>", "f"], [3, 50]
)
def test_no_cut_changes_what_is_found_in_any_text(format, words, places):
    text = "".join(words)
    whole = parse(format, [text])
    assert parse(format, cut(text, places)) == whole
    assert parse(format, list(text)) == whole
    if not whole[1]:
        assert whole[0] == text  # nothing is lost where nothing was found


def test_arguments_are_handed_on_while_they_are_written():
    parser = tool_parser("hermes")
    assert parser.push('<tool_call>{"name": "f", "arguments": {"te').calls[0].arguments == '{"te'
    assert parser.push('xt": "abc').calls[0].arguments == 'xt": "abc'
    assert parser.push(' "}').calls[0].arguments == ' "}'
    assert parser.push("}</tool_call>").calls == []
    assert parser.calls == 1


def test_long_arguments_take_time_in_proportion():
    text = '<tool_call>{"name": "f", "arguments": {"t": "' + "word " * 40_000 + '"}}</tool_call>'
    content, calls = parse("hermes", [text[i : i + 4] for i in range(0, len(text), 4)])
    assert content == ""
    assert len(json.loads(calls[0][1])["t"]) == 200_000


def tool(name="f", **parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_several_calls_are_demanded_only_of_those_who_ask():
    tools = [tool("f"), tool("g")]
    demanded = [
        read_tools(tools, "required", parallel).demanded for parallel in (None, False, True)
    ]
    assert demanded == [1, 1, 4]


def test_tool_choice():
    tools = [tool("f"), tool("g")]
    assert read_tools(None).shown is False
    assert read_tools(tools).choice == "auto"
    assert read_tools(tools, "none").shown is False
    assert list(read_tools(tools, "required").allowed) == ["f", "g"]
    named = read_tools(tools, {"type": "function", "function": {"name": "g"}})
    assert (named.choice, list(named.allowed)) == ("required", ["g"])


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ("x", None, "tools is str"),
        ([3], None, r"tools\[0\] is int"),
        ([{"type": "web"}], None, r"tools\[0\].type"),
        ([{"type": "function"}], None, r"tools\[0\].function"),
        ([tool("a b")], None, r"tools\[0\].function.name"),
        ([tool(), tool()], None, r"tools\[1\].function.name is 'f' again"),
        ([{"function": {"name": "f", "parameters": 3}}], None, r"tools\[0\].function.parameters"),
        ([tool()], "requird", "tool_choice is 'requird'"),
        ([tool()], 3, "tool_choice names no tool"),
        ([tool()], {"function": {"name": "h"}}, "tool_choice names 'h'"),
        (None, "required", "tool_choice asks for a tool"),
    ],
)
def test_wrong_tools_are_refused_by_name(tools, choice, message):
    with pytest.raises(RequestError, match=message):
        read_tools(tools, choice)


def test_formats_of_templates_and_ids():
    assert format_of("...<tool_call>...") == "hermes"
    assert format_of("...[TOOL_CALLS]...") == "mistral"
    assert format_of("<|start_header_id|> <|python_tag|>") == "llama3"
    assert format_of("{{ messages }}") is None
    for other in ("<function=f>", "<arg_key>", '<invoke name="f">'):
        assert format_of(f"<tool_call>{other}</tool_call>") is None
    assert len(new_call_id("mistral")) == 9
    assert new_call_id("hermes") != new_call_id("hermes")
