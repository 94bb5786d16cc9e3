"""Answers of the shape that was asked for, from a model that knows nothing, through OpenAI's unmodified client."""

import json
import re
from typing import Literal

import live_server
import openai
import pydantic
import pytest

MESSAGES = [{"role": "user", "content": "Tell me"}]
REGEX = r"[a-f]{2,5}-[0-9]{1,4}"
LARK = 'start: "(" ITEM ("," ITEM){0,3} ")"\nITEM: /[a-z]{1,3}/'


class Thing(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    kind: Literal["big", "small"]
    count: int = pydantic.Field(ge=0, le=999)
    tags: list[Literal["a", "bc"]] = pydantic.Field(max_length=3)
    open: bool


FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "thing", "strict": True, "schema": Thing.model_json_schema()},
}


def text_of(stream, index=0):
    return "".join(
        choice.delta.content or ""
        for chunk in stream
        for choice in chunk.choices
        if choice.index == index
    )


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_schema_is_followed_by_every_answer(agent, temperature):
    asked = dict(model="tiny", messages=MESSAGES, seed=5, n=3, response_format=FORMAT)
    asked["temperature"] = temperature
    whole = agent.client.chat.completions.create(**asked)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        Thing.model_validate_json(choice.message.content)
    if temperature:
        assert len({choice.message.content for choice in whole.choices}) > 1
    stream = agent.client.chat.completions.create(**asked, stream=True)
    assert text_of(stream, 2) == whole.choices[2].message.content


def test_the_clients_own_parser(agent):
    parsed = agent.client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Thing, seed=1
    )
    assert isinstance(parsed.choices[0].message.parsed, Thing)


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        ({"guided_json": Thing.model_json_schema()}, Thing.model_validate_json),
        ({"guided_json": json.dumps(Thing.model_json_schema())}, Thing.model_validate_json),
        ({"guided_regex": REGEX}, re.compile(REGEX).fullmatch),
        ({"guided_choice": ["yes", "no"]}, ["yes", "no"].__contains__),
        ({"grammar": 'root ::= "yes" | "no"'}, re.compile("yes|no").fullmatch),
        ({"json_schema": {"enum": ["yes", "no"]}}, re.compile('"yes"|"no"').fullmatch),
        ({"guided_grammar": LARK}, re.compile(r"\([a-z]{1,3}(,[a-z]{1,3}){0,3}\)").fullmatch),
        ({"structured_outputs": {"regex": REGEX}}, re.compile(REGEX).fullmatch),
        ({"response_format": FORMAT}, Thing.model_validate_json),
    ],
)
def test_all_ways_to_ask(agent, body, fits):
    completion = agent.client.completions.create(
        model="tiny", prompt=["Once", "Twice"], max_tokens=200, seed=3, extra_body=body
    )
    assert all(fits(choice.text) for choice in completion.choices)
    chat = agent.client.chat.completions.create(
        model="tiny", messages=MESSAGES, seed=3, extra_body=body
    )
    assert fits(chat.choices[0].message.content)


def test_a_json_object_begins_as_one_and_text_is_free(agent):
    asked = dict(model="tiny", messages=MESSAGES, temperature=0, max_tokens=20)
    create = agent.client.chat.completions.create
    found = create(**asked, response_format={"type": "json_object"}).choices[0].message.content
    assert found.startswith("{")
    plain = create(**asked).choices[0].message.content
    assert create(**asked, response_format={"type": "text"}).choices[0].message.content == plain


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"guided_regex": "(a"}, "guided_regex cannot be followed"),
        ({"guided_grammar": "begin: 'x'"}, "guided_grammar cannot be followed"),
        ({"response_format": {"type": "jason"}}, "response_format.type is"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs has no 'xml'"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "both say"),
    ],
)
def test_what_cannot_be_followed_is_refused(agent, body, said):
    with pytest.raises(openai.BadRequestError, match=said):
        agent.client.completions.create(model="tiny", prompt="Hi", extra_body=body)
    with pytest.raises(openai.BadRequestError, match=said):
        agent.client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=body)


def test_an_engine_in_a_process_follows_it_too(agent_folder):
    with live_server.live(agent_folder, engine_in="process") as server:
        answer = server.client.chat.completions.create(
            model="tiny", messages=MESSAGES, seed=5, n=2, response_format=FORMAT
        )
        for choice in answer.choices:
            Thing.model_validate_json(choice.message.content)
