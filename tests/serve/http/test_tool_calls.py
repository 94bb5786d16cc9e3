"""Tool calls and reasoning through OpenAI's unmodified client.

Demanded calls come from a model that knows nothing, by the grammar alone; other answers are scripted.
"""

import json

import openai
import pytest
from live_server import AGENT, live, make_folder, scripted

MESSAGES = [{"role": "user", "content": "Weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "?", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
ASKED = dict(model="tiny", messages=MESSAGES, tools=TOOLS, seed=7)
ARGUMENTS = '{"city": "Oslo",  "days": 2}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER = '<tool_call>{"name": "now"}</tool_call>'
TO_WEATHER = {"type": "function", "function": {"name": "weather"}}


def calls_of(message):
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def read_stream(stream):
    """What the deltas add up to: content, reasoning, calls; and the reason at the end."""
    content, reasoning, calls, ids, reason = "", "", [], [], None
    for chunk in stream:
        [choice] = chunk.choices
        assert reason is None  # nothing comes behind it
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert call.type == "function"
                assert call.id
                assert call.function.name
                calls.append((call.function.name, ""))
                ids.append(call.id)
            else:
                assert (call.id, call.type, call.function.name) == (None, None, None)
            name, arguments = calls[call.index]
            calls[call.index] = (name, arguments + call.function.arguments)
        reason = choice.finish_reason or reason
    assert len(set(ids)) == len(ids)
    return content, reasoning, calls, reason


def both_ways(server, **asked):
    """The message and the reason, after the stream has told the same."""
    create = server.client.chat.completions.create
    choice = create(**asked).choices[0]
    message = choice.message
    reasoning = getattr(message, "reasoning_content", None) or ""
    expected = (message.content or "", reasoning, calls_of(message), choice.finish_reason)
    assert read_stream(create(**asked, stream=True)) == expected
    return expected


def check_weather(call):
    assert call[0] == "weather"
    found = json.loads(call[1])
    assert found["city"] in ("Oslo", "Rome")
    assert 1 <= found["days"] <= 9


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_demanded_call_is_one(agent, temperature):
    content, _, calls, reason = both_ways(
        agent, **ASKED, tool_choice=TO_WEATHER, temperature=temperature
    )
    assert (content, reason, len(calls)) == ("", "tool_calls", 1)
    check_weather(calls[0])
    content, _, calls, reason = both_ways(
        agent, **ASKED, tool_choice="required", parallel_tool_calls=False, temperature=temperature
    )
    assert (content, reason, len(calls)) == ("", "tool_calls", 1)
    assert calls[0][0] in ("weather", "now")


def test_calls_are_found_where_the_model_chose_to_call(agent):
    with scripted(agent, f"I look.\n{CALL}\n{OTHER}"):
        found = both_ways(agent, **ASKED)
        assert found == (
            "I look.",
            "",
            [("weather", ARGUMENTS), ("now", "{}")],
            "tool_calls",
        )
        assert both_ways(agent, **ASKED, parallel_tool_calls=False)[2] == [("weather", ARGUMENTS)]
        assert agent.client.chat.completions.create(**ASKED).choices[0].message.content == "I look."
    with scripted(agent, "Nothing to look up."):
        assert both_ways(agent, **ASKED) == ("Nothing to look up.", "", [], "stop")


def test_a_call_that_is_cut_off_is_no_call(agent):
    """A stream has begun to show it by then, and says why it ends."""
    create = agent.client.chat.completions.create
    said = f"I look.\n{CALL}\n{CALL}"
    encode = agent.service.tokenizer.encode
    with scripted(agent, said):
        for text, whole in ((f"I look.\n{CALL[:-30]}", 0), (said[:-30], 1)):
            most = len(encode(text, special=False))
            choice = create(**ASKED, max_tokens=most).choices[0]
            assert choice.finish_reason == "length"
            assert calls_of(choice.message) == [("weather", ARGUMENTS)] * whole
            assert choice.message.content.startswith("I look.")
            assert '"name": "weather"' in choice.message.content
            *_, reason = read_stream(create(**ASKED, max_tokens=most, stream=True))
            assert reason == "length"


def test_fenced_calls_are_found(agent):
    """As Qwen-Coder writes them; other blocks of code are content."""
    fenced = f'```json\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n```'
    with scripted(agent, f"So:\n{fenced}"):
        expected = ("So:", "", [("weather", ARGUMENTS)], "tool_calls")
        assert both_ways(agent, **ASKED) == expected
    for code in ('```json\n{"name": "Bob"}\n```', "```python\nprint({})\n```\nDone.", "a ``` b"):
        with scripted(agent, code):
            assert both_ways(agent, **ASKED) == (code, "", [], "stop")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_demanded_call_ends(agent, seed):
    """A model that never stops by itself makes no more calls than there are tools."""
    found = both_ways(agent, **ASKED | {"seed": seed}, tool_choice="required", temperature=1)
    assert 1 <= len(found[2]) <= len(TOOLS)
    assert found[3] == "tool_calls"


PLAIN = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "<|begin|>{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)
USERS_ONLY = PLAIN.replace("'system', ", "")


@pytest.mark.parametrize("template", [PLAIN, USERS_ONLY])
def test_tools_of_a_template_that_has_no_place_for_them(tmp_path, template):
    folder = make_folder(tmp_path, template, 2048)
    with live(folder, num_gpu_blocks_override=512) as plain:
        content, _, calls, reason = both_ways(plain, **ASKED, tool_choice=TO_WEATHER, temperature=1)
        assert (content, reason, len(calls)) == ("", "tool_calls", 1)
        check_weather(calls[0])
        with scripted(plain, f"I look.\n{CALL}"):
            expected = ("I look.", "", [("weather", ARGUMENTS)], "tool_calls")
            assert both_ways(plain, **ASKED) == expected
            message = plain.client.chat.completions.create(**ASKED).choices[0].message
            shown = plain.last_prompt()
            assert '"name":"weather"' in shown
            assert "Weather?" in shown
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
        with scripted(plain, "Rain."):
            asked = ASKED | {"messages": [*MESSAGES, message, result]}
            assert both_ways(plain, **asked) == ("Rain.", "", [], "stop")
            shown = plain.last_prompt()
        assert '<tool_call>\n{"name":"weather","arguments":{"city":"Oslo","days":2}}' in shown
        assert "<tool_response>\nrain\n</tool_response>" in shown
        plain.at_rest()


def test_none_shows_no_tools_and_finds_no_calls(agent):
    def prompt(**asked):
        body = {"return_token_ids": True}
        answer = agent.client.chat.completions.create(**asked, max_tokens=1, extra_body=body)
        return agent.service.tokenizer.decode(answer.prompt_token_ids, skip_special=False)

    assert prompt(**ASKED).startswith("[weather][now]")
    assert not prompt(**ASKED, tool_choice="none").startswith("[weather]")
    with scripted(agent, CALL):
        assert both_ways(agent, **ASKED, tool_choice="none") == (CALL, "", [], "stop")


def test_a_call_goes_back_with_its_result(agent):
    with scripted(agent, CALL):
        message = agent.client.chat.completions.create(**ASKED).choices[0].message
    said = {"role": "assistant", "tool_calls": [message.tool_calls[0].model_dump()]}
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    answer = agent.client.chat.completions.create(
        **(ASKED | {"messages": [*MESSAGES, message, result, said, result]}),
        max_tokens=1,
        extra_body={"return_token_ids": True},
    )
    prompt = agent.service.tokenizer.decode(answer.prompt_token_ids, skip_special=False)
    assert '"arguments": {"city": "Oslo", "days": 2}}</tool_call>' in prompt  # no text in a text
    assert "None" not in prompt
    assert prompt.count("tool: rain") == prompt.count("</tool_call>") == 2


def test_a_shape_and_tools_together(agent):
    create = agent.client.chat.completions.create
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    asked = ASKED | {"parallel_tool_calls": False, "response_format": shape}
    for seed in range(4):
        message = create(**(asked | {"seed": seed})).choices[0].message
        assert bool(message.content) != bool(message.tool_calls)
        if message.content:
            check_weather(("weather", message.content))


def test_marks_that_are_special_tokens(tmp_path):
    marks = ["<tool_call>", "</tool_call>", "</think>"]
    folder = make_folder(tmp_path / "model", AGENT, 512, marks, special=True)
    with live(folder) as server:
        _, _, calls, reason = both_ways(server, **ASKED, tool_choice=TO_WEATHER)
        assert reason == "tool_calls"
        check_weather(calls[0])
        with scripted(server, f"<think>Hm.</think>I look.{CALL}{OTHER}"):
            found = both_ways(server, **ASKED)
        expected = [("weather", ARGUMENTS), ("now", "{}")]
        assert found == ("I look.", "Hm.", expected, "tool_calls")


def test_what_is_wrong_with_tools_is_said(agent):
    create = agent.client.chat.completions.create
    for change, said in (
        ({"tool_choice": {"type": "function", "function": {"name": "wether"}}}, "wether"),
        ({"tool_choice": "sometimes"}, "tool_choice is 'sometimes'"),
        ({"tools": [{"type": "function"}]}, "tools.0..function is missing"),
        ({"tools": []}, "there are none"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            create(**(ASKED | {"tool_choice": "required"} | change))
    wrong = {"role": "assistant", "tool_calls": [{"id": "x"}]}
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\].tool_calls\[0\] has no"):
        create(**(ASKED | {"messages": [*MESSAGES, wrong]}))


# -- reasoning ------------------------------------------------------------------------------------


def test_a_thought_is_apart_from_the_answer(agent):
    plain = dict(model="tiny", messages=MESSAGES)
    with scripted(agent, "<think>\nHm, well.\n</think>\n\nYes."):
        assert both_ways(agent, **plain) == ("Yes.", "Hm, well.", [], "stop")
    opened = plain | {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    with scripted(agent, "Hm, well.\n</think>\n\nYes."):
        assert both_ways(agent, **opened) == ("Yes.", "Hm, well.", [], "stop")
    with scripted(agent, f"I call.</think>{CALL}"):
        found = both_ways(agent, **opened, tools=TOOLS)
    assert found == ("", "I call.", [("weather", ARGUMENTS)], "tool_calls")


def test_tokens_of_a_thought_are_counted(agent):
    """Whole, streamed and in /v1/responses: as many as stand between the marks."""
    thought, tokenizer = " ".join(["Hm, well, 漢字 and more."] * 6), agent.service.tokenizer
    expected = len(tokenizer.encode(thought, special=False))
    plain = dict(model="tiny", messages=MESSAGES)
    create = agent.client.chat.completions.create
    with scripted(agent, f"<think>{thought}</think>Yes."):
        found = [create(**plain).usage]
        found.append(
            list(create(**plain, stream=True, stream_options={"include_usage": True}))[-1].usage
        )
        two = list(create(**plain, n=2, stream=True, stream_options={"include_usage": True}))
        answered = agent.client.responses.create(model="tiny", input="Weather?").usage
    counted = [usage.completion_tokens_details.reasoning_tokens for usage in found]
    assert counted == [expected, expected]
    assert two[-1].usage.completion_tokens_details.reasoning_tokens == 2 * expected
    assert found[0].completion_tokens > expected
    assert answered.output_tokens_details.reasoning_tokens == expected
    with scripted(agent, "Yes."):
        assert create(**plain).usage.completion_tokens_details.reasoning_tokens == 0


def test_a_shape_begins_behind_the_thought(agent):
    close = agent.service.tokenizer.id("</think>")
    body = {
        "chat_template_kwargs": {"enable_thinking": True},
        "logit_bias": {str(close): 100},  # else it would think for ever
    }
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    plain = dict(model="tiny", messages=MESSAGES, seed=2, extra_body=body)
    content, reasoning, _, reason = both_ways(agent, **plain, response_format=shape)
    assert (reasoning, reason) == ("", "stop")
    check_weather(("weather", content))
    _, _, calls, reason = both_ways(agent, **plain, tools=TOOLS, tool_choice=TO_WEATHER)
    assert reason == "tool_calls"
    check_weather(calls[0])


HARMONY = (
    "{{ reasoning_effort }}{% for message in messages %}<|start|>{{ message.role }}"
    "{% if message.thinking %}<|channel|>analysis<|message|>{{ message.thinking }}{% endif %}"
    "<|message|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_channels_of_harmony_become_reasoning_calls_and_content(tmp_path):
    marks = [f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "call")]
    folder = make_folder(tmp_path / "tiny", HARMONY, added=marks, special=True)
    thought = "<|channel|>analysis<|message|>Hm.<|start|>assistant"
    call = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}"
    with live(folder) as server:
        with scripted(server, thought + call):
            expected = ("", "Hm.", [("weather", ARGUMENTS)], "tool_calls")
            assert both_ways(server, **ASKED) == expected
        with scripted(server, f"{thought}<|channel|>final<|message|>Rain."):
            assert both_ways(server, **ASKED, reasoning_effort="low") == (
                "Rain.",
                "Hm.",
                [],
                "stop",
            )
            assert server.service.tokenizer.decode(server.asked).startswith("low")
            said = server.client.responses.create(model="tiny", input="Weather?")
            assert said.output_text == "Rain."
            past = {"role": "assistant", "reasoning_content": "Hm, so.", "content": None}
            past["tool_calls"] = [{"id": "a", "type": "function", "function": {"name": "now"}}]
            both_ways(server, **ASKED | {"messages": [*MESSAGES, past, *MESSAGES]})
            assert "Hm, so." in server.service.tokenizer.decode(server.asked)
