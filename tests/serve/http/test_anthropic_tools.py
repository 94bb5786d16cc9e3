"""Tools, thoughts and shapes through Anthropic's unmodified client, whole and as a stream."""

import json

import pytest
from live_server import scripted
from test_tool_calls import ARGUMENTS, CALL, OTHER, SCHEMA, check_weather

MESSAGES = [{"role": "user", "content": "Weather?"}]
TOOLS = [
    {"name": "weather", "description": "?", "input_schema": SCHEMA},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
ASKED = dict(model="tiny", messages=MESSAGES, max_tokens=400)
WITH_TOOLS = ASKED | {"tools": TOOLS}
PARSED = json.loads(ARGUMENTS)


@pytest.fixture(scope="module")
def client(agent):
    anthropic = pytest.importorskip("anthropic", reason="needs the anthropic client")
    with anthropic.Anthropic(base_url=agent.url, api_key="sk-test", max_retries=0) as made:
        yield made


def spelled(message):
    """What a message holds, apart from ids."""
    found = []
    for block in message.content:
        match block.type:
            case "text":
                found.append(("text", block.text))
            case "thinking":
                found.append(("thinking", block.thinking))
            case "tool_use":
                found.append(("tool_use", block.name, block.input))
    return found, message.stop_reason


def both_ways(client, **asked):
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        events = [event.type for event in stream]
        last = stream.get_final_message()
    assert spelled(last) == spelled(whole)
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert events.count("content_block_start") == len(whole.content)
    assert events.count("content_block_stop") == len(whole.content)
    ids = [block.id for block in whole.content if block.type == "tool_use"]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    return spelled(whole)


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "weather"}, {"type": "any"}])
def test_a_demanded_call_is_one(client, choice):
    choice = choice | {"disable_parallel_tool_use": True}
    body = {"temperature": 0}
    [call], reason = both_ways(client, **WITH_TOOLS, tool_choice=choice, extra_body=body)
    assert (call[0], reason) == ("tool_use", "tool_use")
    if call[1] == "weather":
        check_weather(("weather", json.dumps(call[2])))


def test_calls_that_the_model_chose_to_make(agent, client):
    weather, now = ("tool_use", "weather", PARSED), ("tool_use", "now", {})
    with scripted(agent, f"I look.\n{CALL}\n{OTHER}"):
        found = both_ways(client, **WITH_TOOLS)
        assert found == ([("text", "I look."), weather, now], "tool_use")
        one = {"type": "auto", "disable_parallel_tool_use": True}
        single = client.messages.create(**WITH_TOOLS, tool_choice=one)
        assert spelled(single)[0] == [("text", "I look."), weather]
        ignored = client.messages.create(**WITH_TOOLS, tool_choice={"type": "none"})
        assert spelled(ignored) == ([("text", f"I look.\n{CALL}\n{OTHER}")], "end_turn")
    with scripted(agent, f"Hm.\n</think>\n{CALL}"):
        thinking = {"type": "enabled", "budget_tokens": 1024}
        found = both_ways(client, **WITH_TOOLS, thinking=thinking)
        assert found == ([("thinking", "Hm."), weather], "tool_use")
        with client.messages.stream(**WITH_TOOLS, thinking=thinking) as stream:
            parts = [event.partial_json for event in stream if event.type == "input_json"]
        assert "".join(parts) == ARGUMENTS
        assert len(parts) > 1  # as they come, not at the end


def test_a_call_that_is_cut_says_so(agent, client):
    with scripted(agent, CALL):
        count = len(agent.service.tokenizer.encode(CALL[:-30], special=False))
        message = client.messages.create(**WITH_TOOLS | {"max_tokens": count})
    assert message.stop_reason == "max_tokens"
    [text] = message.content
    assert (text.type, text.text) == ("text", CALL[: len(text.text)])
    assert len(text.text) >= len(CALL) - 32


def test_calls_and_results_go_back(agent, client):
    with scripted(agent, f"<think>Hm.</think>I look.{CALL}"):
        first = client.messages.create(**WITH_TOOLS)
    use = next(block for block in first.content if block.type == "tool_use")
    said = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
    results = {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": use.id, "content": "rain"},
            {
                "type": "tool_result",
                "tool_use_id": use.id,
                "is_error": True,
                "content": [{"type": "text", "text": "no wind"}],
            },
            {"type": "text", "text": "And now?"},
        ],
    }
    asked = WITH_TOOLS | {"messages": [*MESSAGES, said, results]}
    with scripted(agent, "Rain."):
        assert both_ways(client, **asked) == ([("text", "Rain.")], "end_turn")
        prompt = agent.last_prompt()
    assert prompt.startswith("[weather][now]")
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}' in prompt
    for said in ("tool: rain", "tool: Error: no wind", "user: And now?", "assistant: I look."):
        assert prompt.count(f"<|begin|>{said}") == 1
    counted = client.messages.count_tokens(
        model="tiny", messages=asked["messages"], tools=asked["tools"]
    )
    assert counted.input_tokens == len(agent.last_ids())


def test_thoughts(agent, client):
    with scripted(agent, "<think>\nHm, well.\n</think>\n\nYes."):
        expected = ([("thinking", "Hm, well."), ("text", "Yes.")], "end_turn")
        assert both_ways(client, **ASKED) == expected
        both_ways(client, **ASKED, thinking={"type": "disabled"})
        assert not agent.last_prompt().endswith("<think>\n")
    with scripted(agent, "Hm.</think>Yes."):
        adaptive = both_ways(client, **ASKED, thinking={"type": "adaptive"})
        assert adaptive == ([("thinking", "Hm."), ("text", "Yes.")], "end_turn")
    with scripted(agent, ""):
        assert both_ways(client, **ASKED) == ([("text", "")], "end_turn")


def test_a_shape(client):
    shape = {"format": {"type": "json_schema", "schema": SCHEMA}}
    [(kind, text)], reason = both_ways(
        client, **ASKED, output_config=shape, extra_body={"temperature": 0}
    )
    assert (kind, reason) == ("text", "end_turn")
    check_weather(("weather", text))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is"),
        ({"tools": [{"name": "bad name", "input_schema": {}}]}, "tools[0].function.name is"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name is missing"),
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": TOOLS}, "'other'"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice.name is missing"),
        ({"tool_choice": {"type": "any"}}, "there are none"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens is 0"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
            "output_config.format.schema cannot be followed",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0] is a part of type 'image'",
        ),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": " "}]}, "no text to go on with"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id is missing",
        ),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role is 'king'"),
        ({"messages": []}, "messages is empty"),
        ({"system": [{"type": "text"}]}, "system[0].text is missing"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(agent, change, said):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        if path.endswith("tokens") and "output_config" in change:
            continue  # a shape costs no tokens
        response = agent.http.post(path, json=ASKED | change)
        assert response.status_code == 400, response.text
        assert response.json()["type"] == "error"
        assert said in response.json()["error"]["message"]
