"""Anthropic's unmodified client against our server: the same text as OpenAI's client gets for the same conversation."""

import pytest

MESSAGES = [{"role": "user", "content": "Once upon a time"}]
ASKED = dict(model="tiny", messages=MESSAGES, max_tokens=24, extra_body={"temperature": 0})


@pytest.fixture(scope="module")
def client(server):
    anthropic = pytest.importorskip("anthropic", reason="needs the anthropic client")
    with anthropic.Anthropic(base_url=server.url, api_key="sk-test", max_retries=0) as made:
        yield made


def test_the_same_text_as_by_the_other_interface(server, client):
    other = server.client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=24
    )
    message = client.messages.create(**ASKED)
    assert message.content[0].text == other.choices[0].message.content
    assert message.stop_reason in ("max_tokens", "end_turn")
    used = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert (used, message.usage.output_tokens) == (
        other.usage.prompt_tokens,
        other.usage.completion_tokens,
    )
    counted = client.messages.count_tokens(model="tiny", messages=MESSAGES)
    assert counted.input_tokens == other.usage.prompt_tokens


def test_a_stream(server, client):
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text
    assert last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens


def test_a_stream_begins_with_the_prompt_as_it_ends_counting_it(server, client):
    """What the cache had is known by the first event: clients show these numbers, and budgets count them."""
    said = [{"role": "user", "content": "A stone lay on a stone that lay on a stone."}]
    for _ in range(2):  # the second one finds the first one's prompt
        events = list(client.messages.create(**ASKED | {"messages": said, "stream": True}))
        first = next(event.message.usage for event in events if event.type == "message_start")
        last = next(event.usage for event in events if event.type == "message_delta")
        found = (first.input_tokens, first.cache_read_input_tokens)
        assert found == (last.input_tokens, last.cache_read_input_tokens)
        assert first.output_tokens == 0
    assert first.cache_read_input_tokens > 0


def test_system_parts_and_stop_sequences(server, client):
    text = client.messages.create(**ASKED).content[0].text
    stopped = client.messages.create(**ASKED, stop_sequences=[text[6:9]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[6:9])
    parts = [{"type": "text", "text": "Be kind."}]
    said = [
        client.messages.create(**ASKED, system=system).content[0].text
        for system in ("Be kind.", parts)
    ]
    assert said[0] == said[1] != text


def test_mistakes_are_told_in_its_own_form(server, client):
    import anthropic

    assert client.messages.create(**ASKED | {"model": "claude-haiku"}).model == "tiny"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude-haiku")
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as wrong:
        client.messages.create(**ASKED | {"max_tokens": 0})
    assert wrong.value.body["type"] == "error"
    assert client.messages.create(**ASKED | {"max_tokens": 5000}).usage.output_tokens > 0


def test_models_are_listed_in_its_own_form(server, client):
    [listed] = client.models.list()
    assert (listed.id, listed.type, listed.display_name) == ("tiny", "model", "tiny")
    assert listed.created_at.year >= 2024
    assert listed.max_input_tokens == 160
    assert client.models.retrieve("tiny") == listed
    assert server.http.get("/v1/models").json()["object"] == "list"  # of everybody else, OpenAI's


def test_a_shape_is_asked_for_in_two_places(server):
    """Older clients have it beside the messages."""
    shape = {"type": "json_schema", "schema": {"const": "yes"}}
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12}
    for asked in ({"output_config": {"format": shape}}, {"output_format": shape}):
        found = server.http.post("/v1/messages", json=body | asked).json()
        assert found["content"][0]["text"].strip() == '"yes"'


def test_paths_that_do_not_exist_are_told_in_its_own_form(server):
    for method, path, kind in (
        ("GET", "/v1/messages", "invalid_request_error"),
        ("POST", "/v1/messages/batches", "not_found_error"),
    ):
        found = server.http.request(method, path).json()
        assert (found["type"], found["error"]["type"]) == ("error", kind)
