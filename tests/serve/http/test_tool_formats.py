"""Tools of a model whose own form of calls is not read: its template shows them, and JSON calls are found."""

import json

import pytest
from live_server import live, make_folder, scripted
from test_tool_calls import ARGUMENTS, ASKED, CALL, MESSAGES, TO_WEATHER, both_ways, check_weather

from cairn.models.chat_template import ChatTemplates
from cairn.serve.http.tools.tools import format_for, note_on_tools

HEAD = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
TURNS = (
    "{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}CALLS{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)
XML_CALL = (
    "<tool_call>\n<function={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>{{ v }}</parameter>{% endfor %}</function></tool_call>"
)
XML = HEAD + TURNS.replace("CALLS", XML_CALL)
TEXTS = HEAD + TURNS.replace("CALLS", "{{ '>>>' + c.function.name + ' ' + c.function.arguments }}")
NO_HISTORY = HEAD + TURNS.replace("CALLS", "")
NO_TOOLS = TURNS.replace("CALLS", XML_CALL)
JSON_CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
PAIRS = "<tool_call>weather\n<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
WRITTEN = "<tool_call>\n<function=weather><parameter=city>Oslo</parameter></function></tool_call>"


def templates(source):
    return ChatTemplates({"default": source}, {}, "test")


@pytest.mark.parametrize(
    ("source", "support", "format"),
    [
        (XML, (True, "objects"), "json"),
        (TEXTS, (True, "texts"), "json"),
        (NO_HISTORY, (True, "no"), "json"),
        (NO_TOOLS, (False, "objects"), "hermes"),
        ("{{ messages[0].content }}", (False, "no"), "hermes"),
        ("{{ raise_exception('no') }}", (False, "no"), "hermes"),
        (HEAD + "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
         (True, "no"), "json"),
    ],
)  # fmt: skip
def test_what_a_template_writes_about_tools(source, support, format):
    assert templates(source).tool_support == support
    assert format_for(templates(source)) == format


def test_the_chosen_format_is_said_at_the_start():
    assert "are not read yet" in note_on_tools(templates(XML))
    assert note_on_tools(templates("<tool_call>")) == "tool calls: hermes"
    assert note_on_tools(templates("{{ messages }}")).endswith("described in the system message")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("models") / "xml", XML, 768)
    with live(folder, num_gpu_blocks_override=512) as made:
        assert any("tool calls" in note for note in made.service.serving.notes)
        yield made
        made.at_rest()


def past(answer):
    """A conversation in which the tool was called, with its result."""
    call = {"id": "call00001", "type": "function"}
    call["function"] = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    result = {"role": "tool", "tool_call_id": "call00001", "content": answer}
    return [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}, result]


def test_the_template_shows_the_tools_and_past_calls_itself(server):
    with scripted(server, "Rain."):
        server.client.chat.completions.create(**(ASKED | {"messages": past("rain")}))
    prompt = server.last_prompt()
    assert prompt.startswith("[weather][now]")
    assert WRITTEN in prompt
    assert "tool: rain" in prompt
    assert "You can call" not in prompt


@pytest.mark.parametrize("said", [WRITTEN, PAIRS, '{"city": "Oslo"}', "{", f"See {JSON_CALL}."])
def test_what_is_no_json_call_is_content_to_the_last_character(server, said):
    with scripted(server, said):
        assert both_ways(server, **ASKED) == (said, "", [], "stop")


@pytest.mark.parametrize(
    "said", [JSON_CALL, f"{{{JSON_CALL}}}", CALL, f"<tools>{JSON_CALL}</tools>"]
)
def test_json_calls_of_offered_tools_are_found(server, said):
    expected = ("", "", [("weather", ARGUMENTS)], "tool_calls")
    with scripted(server, said):
        assert both_ways(server, **ASKED) == expected
        [line] = [
            json.loads(line)
            for line in server.http.post(
                "/api/chat", json={**ASKED, "stream": False}
            ).text.splitlines()
        ]
    [call] = line["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": json.loads(ARGUMENTS)}


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_demanded_call_is_json_without_marks_of_another_form(server, temperature):
    for more in (dict(tool_choice=TO_WEATHER), dict(tool_choice="required")):
        content, _, calls, reason = both_ways(server, **ASKED, **more, temperature=temperature)
        assert (content, reason, len(calls)) == ("", "tool_calls", 1)
        if more["tool_choice"] == TO_WEATHER:
            check_weather(calls[0])
    asked = dict(**ASKED, tool_choice=TO_WEATHER, extra_body={"return_token_ids": True})
    choice = server.client.chat.completions.create(**asked).choices[0]
    assert server.service.tokenizer.decode(choice.token_ids).startswith('{"name": "weather"')


def test_capabilities_are_those_of_the_template(server):
    shown = server.http.post("/api/show", json={"model": "tiny"}).json()
    assert shown["capabilities"] == ["completion", "tools"]


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (TEXTS, '>>>weather {"city":"Oslo"}'),
        (NO_HISTORY, '<tool_call>\n{"name":"weather","arguments":{"city":"Oslo"}}\n</tool_call>'),
        # Asks for null, and measures it.
        (
            XML.replace(
                "{{ m.content }}",
                "{% if m.content is none or m.content|length %}{{ m.content|length }}{% endif %}",
            ),
            WRITTEN,
        ),
    ],
)
def test_past_calls_are_written_as_the_template_can(tmp_path, source, written):
    with live(make_folder(tmp_path, source, 768)) as made:
        with scripted(made, "Rain."):
            messages = past("rain")
            messages[1]["content"] = None
            made.client.chat.completions.create(**(ASKED | {"messages": messages}))
        assert made.last_prompt().startswith("[weather][now]")
        assert written in made.last_prompt()
