"""Tools, thoughts and shapes in /v1/responses through OpenAI's unmodified client, whole and as a stream."""

import json

import pydantic
import pytest
from live_server import scripted
from test_tool_calls import ARGUMENTS, CALL, OTHER, SCHEMA, check_weather

TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "description": "?",
        "parameters": SCHEMA,
        "strict": True,
    },
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
ASKED = dict(model="tiny", input="Weather?")
WITH_TOOLS = ASKED | {"tools": TOOLS}
WEATHER, NOW = ("function_call", "weather", ARGUMENTS), ("function_call", "now", "{}")


class Place(pydantic.BaseModel):
    city: str
    days: int


def spelled(response):
    """What a response holds, apart from ids."""
    found = []
    for item in response.output:
        match item.type:
            case "message":
                found.append(("message", item.content[0].text))
            case "reasoning":
                found.append(("reasoning", item.content[0].text))
            case "function_call":
                found.append(("function_call", item.name, item.arguments))
    return found, response.status


def both_ways(server, **asked):
    create = server.client.responses.create
    whole = create(**asked)
    events = list(create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1].response
    assert spelled(last) == spelled(whole)
    assert last.usage.output_tokens == whole.usage.output_tokens
    check_events(events, last.output)
    return spelled(whole)


def check_events(events, output):
    """Deltas add up to what is done, and everything that is added is done."""
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert added == [item.id for item in done] == [item.id for item in output]
    assert len(set(added)) == len(added)
    for index, item in enumerate(output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        grown = "".join(event.delta for event in mine if event.type.endswith(".delta"))
        if item.type == "function_call":
            [end] = [event for event in mine if event.type.endswith("arguments.done")]
            assert grown == end.arguments == item.arguments
        else:
            [end] = [event for event in mine if event.type.endswith("_text.done")]
            assert grown == end.text == item.content[0].text
            parts = [event for event in mine if "content_part" in event.type]
            assert [event.type.split(".")[-1] for event in parts] == ["added", "done"]
            assert parts[1].part.text == item.content[0].text


@pytest.mark.parametrize("choice", [{"type": "function", "name": "weather"}, "required"])
def test_a_demanded_call_is_one(agent, choice):
    found = both_ways(
        agent, **WITH_TOOLS, tool_choice=choice, parallel_tool_calls=False, temperature=0
    )
    ([(kind, name, arguments)], status) = found
    assert (kind, status) == ("function_call", "completed")
    if name == "weather":
        check_weather((name, arguments))


def test_calls_that_the_model_chose_to_make(agent):
    with scripted(agent, f"I look.\n{CALL}\n{OTHER}"):
        found = both_ways(agent, **WITH_TOOLS)
        assert found == ([("message", "I look."), WEATHER, NOW], "completed")
        one = agent.client.responses.create(**WITH_TOOLS, parallel_tool_calls=False)
        assert spelled(one)[0] == [("message", "I look."), WEATHER]
        none = agent.client.responses.create(**WITH_TOOLS, tool_choice="none")
        assert spelled(none) == ([("message", f"I look.\n{CALL}\n{OTHER}")], "completed")
        count = len(agent.service.tokenizer.encode(f"I look.\n{CALL[:-30]}", special=False))
        items, status = both_ways(agent, **WITH_TOOLS, max_output_tokens=count)
        assert status == "incomplete"
        assert ARGUMENTS.startswith(items[1][2])
    with scripted(agent, f"Hm.\n</think>\n{CALL}"):
        found = both_ways(agent, **WITH_TOOLS, reasoning={"effort": "high"})
        assert found == ([("reasoning", "Hm."), WEATHER], "completed")


def test_calls_and_results_go_back(agent):
    with scripted(agent, f"<think>Hm.</think>I look.{CALL}{OTHER}"):
        first = agent.client.responses.create(**WITH_TOOLS)
    calls = [item for item in first.output if item.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": calls[0].call_id, "output": "rain"},
        {
            "type": "function_call_output",
            "call_id": calls[1].call_id,
            "output": [{"type": "input_text", "text": "noon"}],
        },
    ]
    given = [{"role": "user", "content": "Weather?"}, *first.output, *results]
    developer = {"type": "message", "role": "developer", "content": "Be kind."}
    with scripted(agent, "Rain."):
        asked = WITH_TOOLS | {"input": [developer, *given], "instructions": "Think."}
        assert both_ways(agent, **asked) == ([("message", "Rain.")], "completed")
        prompt = agent.last_prompt()
    assert "<|begin|>system: Think.<|begin|>system: Be kind.<|begin|>user: Weather?" in prompt
    called = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}</tool_call>'
    assert f"<|begin|>assistant: I look.{called}<tool_call>" in prompt
    assert "<|begin|>tool: rain<|begin|>tool: noon<|begin|>assistant: " in prompt


def test_the_account_that_the_client_keeps_of_a_stream(agent):
    with (
        scripted(agent, f"<think>Hm.</think>I look.{CALL}{OTHER}"),
        agent.client.responses.stream(**WITH_TOOLS) as stream,
    ):
        calls = [event for event in stream if event.type == "response.function_call_arguments.done"]
        found = spelled(stream.get_final_response())
    assert found == ([("reasoning", "Hm."), ("message", "I look."), WEATHER, NOW], "completed")
    assert [call.name for call in calls] == ["weather", "now"]


def test_thoughts(agent):
    with scripted(agent, "<think>\nHm, well.\n</think>\n\nYes."):
        expected = ([("reasoning", "Hm, well."), ("message", "Yes.")], "completed")
        assert both_ways(agent, **ASKED) == expected
    with scripted(agent, "Hm.</think>Yes."):
        found = both_ways(agent, **ASKED, reasoning={"effort": "low"})
        assert found == ([("reasoning", "Hm."), ("message", "Yes.")], "completed")
        agent.client.responses.create(**ASKED, reasoning={"effort": "none"})
        assert not agent.last_prompt().endswith("<think>\n")
    with scripted(agent, ""):
        assert both_ways(agent, **ASKED) == ([("message", "")], "completed")


def test_shapes(agent):
    shape = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    [(kind, text)], status = both_ways(agent, **ASKED, text=shape, temperature=0)
    assert (kind, status) == ("message", "completed")
    check_weather(("weather", text))
    loose = agent.client.responses.create(
        **ASKED, text={"format": {"type": "json_object"}}, max_output_tokens=20
    )
    assert loose.output_text.startswith("{")
    with scripted(agent, json.dumps({"city": "Rome", "days": 3})):
        parsed = agent.client.responses.parse(**ASKED, text_format=Place).output_parsed
        assert parsed == Place(city="Rome", days=3)


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type is 'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function.name is"),
        ({"tool_choice": "required"}, "tool_choice", "there are none"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice", "'other'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text.format.type is"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is missing"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "text",
         "text.format.schema cannot be followed"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0].type is"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input",
         "input[0].content[0] is a part of type 'input_image'"),
        ({"input": [{"role": "king", "content": "Hi"}]}, "input", "input[0].role is 'king'"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input", "input[0].arguments is missing"),
        ({"input": []}, "input", "input is empty"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "reasoning.effort is"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include", "send logprobs to"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"input": "x " * 3000}, "input", "the context is 768"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(agent, change, param, said):
    response = agent.http.post("/v1/responses", json=ASKED | change)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert said in error["message"]
    assert error["param"] == param
