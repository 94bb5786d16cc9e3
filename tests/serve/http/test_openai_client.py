"""OpenAI's unmodified client against our server: the same tokens as the plain generator, and errors it understands."""

import math

import live_server
import openai
import pytest
import torch

from cairn.models.attend import Cached, KVCache
from cairn.models.checkpoint import open_checkpoint
from cairn.models.generate import GenerateSampling, Generation
from cairn.serve.http.server.keys import Keys

MESSAGES = [{"role": "user", "content": "Once upon a time"}]
RENDERED = "<|begin|>user: Once upon a time<|begin|>assistant: "
FORMS = "The quick brown fox"


@pytest.fixture(scope="module")
def oracle(tiny_folder):
    """Greedy tokens and log-probabilities from the plain model."""
    checkpoint = open_checkpoint(tiny_folder)
    return Oracle(checkpoint.load("cpu", torch.float32), checkpoint.tokenizer())


class Oracle:
    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer

    def text(self, ids, most):
        tokens = list(Generation(self.model, ids, GenerateSampling(max_tokens=most), (0,)))
        decoder = self.tokenizer.stream(after=ids[-16:])
        kept = [token for token in tokens if token != 0]
        return "".join([decoder.push(token) for token in kept]) + decoder.flush()

    @torch.inference_mode()
    def logprobs(self, ids):
        """Of each token after the first, and the likeliest in its place."""
        cache = KVCache(self.model.spec, len(ids), torch.float32, torch.device("cpu"))
        attend = Cached([cache], [len(ids)])
        hidden = self.model(torch.tensor(ids), attend.positions_T(), attend)
        found = torch.log_softmax(self.model.logits(hidden).float(), -1)
        chosen = found[:-1].gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
        return chosen.tolist(), found[:-1].max(-1).values.tolist()


def test_models(server):
    listed = server.client.models.list().data
    assert [model.id for model in listed] == ["tiny"]
    assert server.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("other")


def test_chat_says_what_the_plain_generator_says(server, oracle):
    ids = oracle.tokenizer.encode(RENDERED, special=False)
    answer = server.client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=24
    )
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == oracle.text(ids, 24)
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.total_tokens == len(ids) + answer.usage.completion_tokens


def test_a_stream_is_the_same_answer_in_pieces(server):
    asked = dict(model="tiny", messages=MESSAGES, temperature=0, max_tokens=24, n=2)
    whole = server.client.chat.completions.create(**asked)
    texts, reasons = ["", ""], [None, None]
    usage = None
    for chunk in server.client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_usage_in_every_chunk(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        server.client.completions.create(
            model="tiny",
            prompt="Hi",
            max_tokens=5,
            stream=True,
            stream_options=options,
            extra_body={"ignore_eos": True},
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert chunks[-1].choices == []


def test_chat_logprobs(server):
    answer = server.client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs)  # temperature 0
        assert token.top_logprobs[0].token == token.token
    spelled = b"".join(bytes(token.bytes or []) for token in content)
    assert answer.choices[0].message.content.encode() in spelled.replace(b"<|end|>", b"") or (
        "�" in answer.choices[0].message.content
    )


def test_all_forms_of_a_prompt_give_the_same_answer(server, oracle):
    ids = oracle.tokenizer.encode(FORMS)
    expected = oracle.text(ids, 12)
    for prompt in (FORMS, [FORMS], ids, [ids]):
        answer = server.client.completions.create(
            model="tiny", prompt=prompt, temperature=0, max_tokens=12
        )
        assert [choice.text for choice in answer.choices] == [expected]
    several = server.client.completions.create(
        model="tiny", prompt=[FORMS, "Yes"], temperature=0, max_tokens=12, n=2
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in several.choices[:2]] == [expected] * 2


@pytest.mark.parametrize("most", [0, 1])
def test_echo_scores_the_prompt_as_evaluation_tools_ask(server, oracle, most):
    ids = oracle.tokenizer.encode(FORMS)
    answer = server.client.completions.create(
        model="tiny", prompt=[ids], echo=True, logprobs=1, max_tokens=most, temperature=0
    )
    found = answer.choices[0].logprobs
    chosen, best = oracle.logprobs(ids)
    scored = found.token_logprobs[: len(ids)]
    assert scored[0] is None
    assert scored[1:] == pytest.approx(chosen, abs=1e-4)
    rows = found.top_logprobs[1 : len(ids)]
    assert [max(row.values()) for row in rows] == pytest.approx(best, abs=1e-4)
    assert all(token in row for token, row in zip(found.tokens[1:], rows, strict=False))
    assert len(found.tokens) == len(ids) + most
    assert answer.choices[0].text.startswith(FORMS)
    for offset, token in zip(found.text_offset[: len(ids)], found.tokens, strict=False):
        assert FORMS[offset:].startswith(token)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_echo_of_one_token_has_it_in_front(server, oracle, most):
    """Nothing comes before it, so that it has no score, but the lists have its place."""
    (first, *_) = oracle.tokenizer.encode(FORMS)
    answer = server.client.completions.create(
        model="tiny", prompt=[[first]], echo=True, logprobs=1, max_tokens=most, temperature=0
    )
    found = answer.choices[0].logprobs
    assert found.token_logprobs[0] is None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 1 + most
    assert "".join(found.tokens) == answer.choices[0].text


def test_log_probabilities_of_a_prompt_in_the_form_of_vllm(server, oracle):
    ids = oracle.tokenizer.encode(FORMS)
    chosen, best = oracle.logprobs(ids)
    asked = {"prompt": [ids, ids[:1]], "n": 2, "max_tokens": 1, "prompt_logprobs": 1}
    for more in ({}, {"echo": True, "logprobs": 5}):  # which scores the prompt as well
        found = server.http.post("/v1/completions", json=asked | more).json()["choices"]
        first, *rest = found[0]["prompt_logprobs"]
        assert first is None
        assert [row[str(id)]["logprob"] for id, row in zip(ids[1:], rest, strict=True)] == (
            pytest.approx(chosen, abs=1e-4)
        )
        assert [max(one["logprob"] for one in row.values()) for row in rest] == (
            pytest.approx(best, abs=1e-4)
        )
        assert all(len(row) <= 2 for row in rest)
        assert any(one["rank"] == 1 and one["decoded_token"] for one in rest[0].values())
        assert found[1]["prompt_logprobs"] == found[0]["prompt_logprobs"]
        assert found[2]["prompt_logprobs"] == [None]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    scored = server.http.post("/v1/chat/completions", json=body | {"prompt_logprobs": 0}).json()
    assert len(scored["prompt_logprobs"]) == scored["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in server.http.post("/v1/chat/completions", json=body).json()


def test_log_probabilities_name_tokens_by_their_ids_where_that_is_asked_for(server):
    """Two tokens may have the same text; evaluation tools then ask vLLM for ids."""
    asked = dict(temperature=0, max_tokens=6, return_token_ids=True)
    for path, body in (
        ("/v1/completions", {"prompt": FORMS, "logprobs": 2, "echo": True}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2},
        ),
    ):
        plain, named = (
            server.http.post(path, json=asked | body | more).json()["choices"][0]
            for more in ({}, {"return_tokens_as_token_ids": True})
        )
        if "text" in plain:
            ids = named["prompt_token_ids"] + named["token_ids"]
            assert named["logprobs"]["tokens"] == [f"token_id:{id}" for id in ids]
            assert named["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
            assert all(
                token in row
                for token, row in zip(
                    named["logprobs"]["tokens"][1:],
                    named["logprobs"]["top_logprobs"][1:],
                    strict=True,
                )
            )
        else:
            rows = named["logprobs"]["content"]
            assert [row["token"] for row in rows] == [f"token_id:{id}" for id in named["token_ids"]]
            assert all(
                one["token"].startswith("token_id:") for row in rows for one in row["top_logprobs"]
            )
            assert [row["bytes"] for row in rows] == [
                row["bytes"] for row in plain["logprobs"]["content"]
            ]


def test_echo_in_a_stream_comes_once(server):
    asked = dict(model="tiny", prompt=FORMS, echo=True, logprobs=2, max_tokens=6, temperature=0)
    whole = server.client.completions.create(**asked).choices[0]
    tokens, offsets, text = [], [], ""
    for chunk in server.client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            text += choice.text
            tokens += choice.logprobs.tokens
            offsets += choice.logprobs.text_offset
    assert text == whole.text
    assert tokens == whole.logprobs.tokens
    assert offsets == whole.logprobs.text_offset


def test_a_stop_string_ends_the_text_and_is_not_in_it(server):
    asked = dict(model="tiny", prompt=FORMS, temperature=0, max_tokens=30)
    text = server.client.completions.create(**asked).choices[0].text
    stop = text[7:10]  # wherever tokens end
    answer = server.client.completions.create(**asked, stop=[stop, "never in there"])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == text[: text.index(stop)]
    streamed = server.client.completions.create(**asked, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text[: text.index(stop)]


def test_a_seed_repeats_and_the_answers_of_one_request_differ(server):
    asked = dict(model="tiny", prompt=FORMS, temperature=1.0, max_tokens=16, seed=7, n=3)
    first = [choice.text for choice in server.client.completions.create(**asked).choices]
    again = [choice.text for choice in server.client.completions.create(**asked).choices]
    assert first == again
    assert len(set(first)) > 1


def test_vllms_fields_reach_the_engine(server):
    extra = {"top_k": 1, "min_tokens": 9, "ignore_eos": True, "return_token_ids": True, "min_p": 0.0,
             "priority": 3, "repetition_penalty": 1.0, "no_such_field": {"is": "ignored"}}  # fmt: skip
    answer = server.client.completions.create(
        model="tiny", prompt=FORMS, max_tokens=9, logit_bias={"65": 100}, extra_body=extra
    )
    assert answer.choices[0].model_extra["token_ids"] == [65] * 9
    assert answer.choices[0].finish_reason == "length"


def test_requests_of_different_salts_share_no_prefix(server):
    prompt = "a salted prompt that is longer than a page of the cache " * 2

    def cached(salt):
        answer = server.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt}
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0


def test_parts_of_text_are_one_text(server):
    parts = [{"type": "text", "text": "Once upon"}, {"type": "text", "text": "a time"}]
    joined = [{"role": "user", "content": "Once upon\na time"}]
    given = [{"role": "user", "content": parts}]
    asked = dict(model="tiny", temperature=0, max_tokens=6)
    answers = [
        server.client.chat.completions.create(messages=messages, **asked)
        for messages in (joined, given)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_a_stream_says_what_stopped_it_as_a_whole_answer_does(server):
    asked = dict(model="tiny", messages=MESSAGES, temperature=0, max_tokens=24)
    text = server.client.chat.completions.create(**asked).choices[0].message.content
    asked["stop"] = [text[4:7]]
    whole = server.client.chat.completions.create(**asked).choices[0]
    *others, last = server.client.chat.completions.create(**asked, stream=True)
    assert whole.stop_reason == last.choices[0].stop_reason == text[4:7]
    assert not any("stop_reason" in (one.choices[0].model_extra or {}) for one in others)


def test_responses(server):
    chat = server.client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=24
    )
    asked = dict(model="tiny", input="Once upon a time", temperature=0, max_output_tokens=24)
    whole = server.client.responses.create(**asked)
    assert whole.output_text == chat.choices[0].message.content
    assert (
        whole.status == {"length": "incomplete", "stop": "completed"}[chat.choices[0].finish_reason]
    )
    assert whole.usage.total_tokens == chat.usage.total_tokens
    with server.client.responses.stream(**asked) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
    assert text == whole.output_text
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Once upon a time"}]}]
    assert server.client.responses.create(**asked | {"input": parts}).output_text == text
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        server.client.responses.create(**asked, previous_response_id="resp_1")


def test_tokenize_and_back(server):
    tokens = server.http.post("/tokenize", json={"prompt": FORMS}).json()
    assert tokens["count"] == len(tokens["tokens"])
    back = server.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back["prompt"] == back["content"] == FORMS
    plain = server.http.post("/tokenize", json={"prompt": FORMS, "add_special_tokens": False})
    as_llamacpp = server.http.post("/tokenize", json={"content": FORMS})
    assert as_llamacpp.json()["tokens"] == plain.json()["tokens"]
    chat = server.http.post(
        "/tokenize", json={"messages": MESSAGES, "return_token_strs": True}
    ).json()
    text = server.http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text == RENDERED
    assert len(chat["token_strs"]) == chat["count"]


WRONG = [
    ({"temperature": 3}, "temperature", "between 0 and 2"),
    ({"temperature": "hot"}, "temperature", "a number between 0 and 2"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"n": 0}, "n", "between 1 and 128"),
    ({"max_tokens": -2}, "max_tokens", "a whole number"),
    ({"stop": [1]}, "stop", "text"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "vocabulary"),
    ({"seed": 2**70}, "seed", "between"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {}}, "stream_options", "stream"),
    ({"presence_penalty": 9}, "presence_penalty", "between -2 and 2"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "max_tokens 3"),
    ({"response_format": {"type": "xml"}}, "response_format", "text"),
]


@pytest.mark.parametrize(
    ("fields", "param", "said"), WRONG, ids=[str(case[0])[:40] for case in WRONG]
)
def test_a_wrong_field_is_named_with_what_it_may_be(server, fields, param, said):
    bodies = {
        "/v1/completions": {"model": "tiny", "prompt": "Hi"},
        "/v1/chat/completions": {"model": "tiny", "messages": MESSAGES},
    }
    for path, body in bodies.items():
        response = server.http.post(path, json=body | fields)
        error = response.json()["error"]
        assert response.status_code == 400, response.text
        assert error["type"] == "invalid_request_error"
        assert error["param"].split("[")[0] == param
        assert said in error["message"]


def test_other_refusals(server):
    create = server.client.completions.create
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("gpt-9")
    with pytest.raises(openai.BadRequestError, match=r"500.*160") as long:
        create(model="tiny", prompt=[5] * 500)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="at most 158 tokens") as few:
        create(model="tiny", prompt=[5, 5], max_tokens=-1, extra_body={"min_tokens": 159})
    assert few.value.param == "min_tokens"
    with pytest.raises(openai.BadRequestError, match="fill in the middle"):
        create(model="tiny", prompt="Hi", suffix="end")
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        create(model="tiny", prompt=[5, 10**6])
    for prompt in ([], ["a", 1], [[1], "a"], [[]], ""):
        with pytest.raises(openai.BadRequestError):
            create(model="tiny", prompt=prompt)
    missing = server.http.post("/v1/chat/completions", json={}).json()["error"]
    assert missing["param"] == "messages"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(openai.BadRequestError, match="text only"):
        server.client.chat.completions.create(model="tiny", messages=image)
    assert server.http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert server.http.get("/v1/completions").status_code == 405


def test_health_version_metrics_and_request_ids(server):
    server.client.completions.create(
        model="tiny", prompt="Hi", max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert server.http.get("/health").json()["status"] == "ok"
    assert server.http.get("/version").json()["version"]
    from prometheus_client.parser import text_string_to_metric_families

    families = {
        family.name for family in text_string_to_metric_families(server.http.get("/metrics").text)
    }
    assert {
        "cairn_http_requests",
        "cairn_time_to_first_token_seconds",
        "cairn_running_requests",
    } <= families
    given = server.http.get("/health", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    other = server.http.get("/health", headers={"x-request-id": "no\tgood; really"})
    assert other.headers["x-request-id"] != "no\tgood; really"


def test_the_openapi_document_names_what_is_enforced(server):
    found = server.http.get("/openapi.json").json()
    fields = found["components"]["schemas"]["CompletionRequest"]["properties"]
    temperature = next(
        kind for kind in fields["temperature"]["anyOf"] if kind.get("type") == "number"
    )
    assert (temperature["minimum"], temperature["maximum"]) == (0, 2)
    assert found["components"]["schemas"]["ChatRequest"]["required"] == ["messages"]
    assert math.isclose(float(found["openapi"][:3]), 3.1)


def test_responses_that_are_kept(tiny_folder):
    keys = Keys([("ann", "sk-ann"), ("bob", "sk-bob")])
    with live_server.live(tiny_folder, keys, store_responses=2) as kept:
        ann, bob = (kept.client.with_options(api_key=key).responses for key in ("sk-ann", "sk-bob"))
        asked = {"model": "tiny", "max_output_tokens": 8, "temperature": 0}
        first = ann.create(input="Once", **asked)
        assert ann.retrieve(first.id).output_text == first.output_text
        with pytest.raises(openai.BadRequestError, match="given whole"):  # not as events
            ann.retrieve(first.id, stream=True)
        second = ann.create(input="Twice", previous_response_id=first.id, **asked)
        said = [
            {"role": "user", "content": "Once"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Twice"},
        ]
        assert second.output_text == ann.create(input=said, store=False, **asked).output_text
        assert second.usage.input_tokens > first.usage.input_tokens
        with pytest.raises(openai.NotFoundError):  # another key's
            bob.retrieve(first.id)
        with ann.stream(input="More", previous_response_id=second.id, **asked) as stream:
            for event in stream:
                if event.type == "response.incomplete":  # at once, while the stream is still open
                    third = ann.retrieve(event.response.id)
        assert third.output_text == event.response.output_text
        with pytest.raises(openai.NotFoundError):  # two are kept
            ann.create(input="x", previous_response_id=first.id, **asked)
        asked_with = ann.input_items.list(second.id, order="asc")
        kinds = [(one.type, one.role, one.content[0].text) for one in asked_with]
        assert kinds == [("message", one["role"], one["content"]) for one in said]
        page = ann.input_items.list(second.id, limit=1)
        assert (page.data[0].content[0].text, page.has_more) == ("Twice", True)
        assert [one.content[0].text for one in page][::-1] == [one["content"] for one in said]
        with pytest.raises(openai.BadRequestError, match="order is 'up'"):
            ann.input_items.list(second.id, order="up")
        ann.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            ann.retrieve(second.id)
