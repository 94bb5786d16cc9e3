"""Prompts that are longer than wanted: cut from the left as vLLM cuts them, or without their oldest turns."""

import live_server
import pytest

TEXT = "One two three, and then a little more of what was said before. " * 3
GREEDY = {"temperature": 0, "max_tokens": 6}


def ids_of(server, text, special=True):
    body = {"prompt": text, "add_special_tokens": special}
    return server.http.post("/tokenize", json=body).json()["tokens"]


def completed(server, **body):
    asked = {**GREEDY, "return_token_ids": True, **body}
    answer = server.http.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.fixture(scope="module")
def bos(server):
    """What stands before every text; the tokenizer of the tiny model adds nothing by itself."""
    ids, bare = ids_of(server, TEXT), ids_of(server, TEXT, special=False)
    return ids[: len(ids) - len(bare)]


def test_the_last_tokens_of_a_text_stay_behind_its_bos(server, bos):
    whole, most = ids_of(server, TEXT), 20
    found = completed(server, prompt=TEXT, truncate_prompt_tokens=most)
    assert found["prompt_token_ids"] == [*bos, *whole[len(whole) - most + len(bos) :]]
    short = ids_of(server, "One")
    assert completed(server, prompt="One", truncate_prompt_tokens=most)["prompt_token_ids"] == short
    of_ids = completed(server, prompt=whole, truncate_prompt_tokens=most)
    assert of_ids["prompt_token_ids"] == whole[-most:]
    echoed = completed(server, prompt=TEXT, truncate_prompt_tokens=most, echo=True, logprobs=0)
    assert TEXT.endswith(echoed["text"].removesuffix(found["text"])[-8:])
    assert len(echoed["logprobs"]["tokens"]) == most + GREEDY["max_tokens"]


def test_minus_one_leaves_room_for_the_answer(server):
    ids = ids_of(server, "x") * (live_server.CONTEXT + 7)
    found = completed(server, prompt=ids, truncate_prompt_tokens=-1)
    assert len(found["prompt_token_ids"]) == live_server.CONTEXT - GREEDY["max_tokens"]
    assert len(found["token_ids"]) <= GREEDY["max_tokens"]
    text = completed(server, prompt=TEXT * 20, truncate_prompt_tokens=-1)
    assert len(text["prompt_token_ids"]) == live_server.CONTEXT - GREEDY["max_tokens"]


def test_conversations_are_cut_as_they_were_rendered(server):
    messages = [{"role": "user", "content": TEXT}, {"role": "user", "content": "And now?"}]
    prompt = server.http.post("/apply-template", json={"messages": messages}).json()["prompt"]
    body = {**GREEDY, "messages": messages, "truncate_prompt_tokens": 12, "return_token_ids": True}
    found = server.http.post("/v1/chat/completions", json=body).json()
    assert found["prompt_token_ids"] == ids_of(server, prompt, special=False)[-12:]
    assert found["usage"]["prompt_tokens"] == 12


def test_vectors_of_ids_are_cut_as_those_of_texts(server):
    ids = ids_of(server, TEXT)
    for side, kept in (("right", ids[:9]), ("left", ids[-9:])):
        asked = {"input": [ids], "truncate_prompt_tokens": 9, "truncation_side": side}
        found = server.http.post("/v1/embeddings", json=asked).json()
        wanted = server.http.post("/v1/embeddings", json={"input": [kept]}).json()
        assert found["usage"]["prompt_tokens"] == 9
        assert found["data"] == wanted["data"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"truncate_prompt_tokens": 0}, "-1 or between 1 and 159"),
        ({"truncate_prompt_tokens": live_server.CONTEXT}, "-1 or between 1 and 159"),
        ({"truncate_prompt_tokens": 5, "suffix": "end"}, "suffix and truncate_prompt_tokens"),
    ],
)
def test_mistakes(server, changes, said):
    refused = server.http.post("/v1/completions", json={"prompt": "a", **changes})
    assert refused.status_code == 400
    assert said in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


def test_responses_leave_out_the_oldest_turns(server):
    """As few as it takes; what the system says stays, and the answer is that to the rest alone."""
    turns = []
    for at in range(12):
        turns += [{"role": "user", "content": f"Question {at}?"}]
        turns += [{"role": "assistant", "content": f"Answer {at}."}]
    asked = {"instructions": "Be brief.", "temperature": 0, "max_output_tokens": 6}
    last = {"role": "user", "content": "And now?"}
    long = {**asked, "input": [*turns, last]}
    assert server.http.post("/v1/responses", json=long).status_code == 400
    found = server.http.post("/v1/responses", json=long | {"truncation": "auto"}).json()
    assert found["truncation"] == "auto"
    for kept in range(len(turns), -1, -2):
        rest = server.http.post(
            "/v1/responses", json={**asked, "input": [*turns[len(turns) - kept :], last]}
        )
        if rest.status_code == 200 and "x-cairn-max-tokens" not in rest.headers:
            break  # with room for the whole answer
    assert 0 < kept < len(turns)
    assert rest.json()["truncation"] == "disabled"
    assert found["usage"] == rest.json()["usage"] | {
        "input_tokens_details": found["usage"]["input_tokens_details"]
    }
    texts = [one["output"][0]["content"][0]["text"] for one in (found, rest.json())]
    assert texts[0] == texts[1]
    alone = {**asked, "input": TEXT * 9, "truncation": "auto"}
    assert server.http.post("/v1/responses", json=alone).status_code == 400


def test_responses_have_a_priority(server, monkeypatch):
    seen, jobs = [], server.service.serving.jobs

    def noted(requests, *rest, **more):
        seen.append(requests[0].priority)
        return jobs(requests, *rest, **more)

    monkeypatch.setattr(server.service.serving, "jobs", noted)
    body = {"input": "Hi", "max_output_tokens": 1, "priority": 7}
    assert server.http.post("/v1/responses", json=body).status_code == 200
    assert seen == [7]
