"""Each field that says how tokens are chosen and when to stop, at both of OpenAI's endpoints, whole and streamed."""

import json
import threading

import live_server
import pytest
from live_server import scripted, wait_until

MESSAGES = [{"role": "user", "content": "Once upon a time"}]
EOS = 0


def completions(server, **asked):
    stream = asked.get("stream")
    body = {"prompt": "Once upon a time", "max_tokens": 12, "return_token_ids": True} | asked
    return _read(server, "/v1/completions", body, stream, lambda choice: choice["text"])


def chat(server, **asked):
    stream = asked.get("stream")
    body = {"messages": MESSAGES, "max_tokens": 12, "return_token_ids": True} | asked

    def text(choice):
        return choice["delta" if stream else "message"].get("content") or ""

    return _read(server, "/v1/chat/completions", body, stream, text)


def _read(server, path, body, stream, text_of):
    """Of each answer: text, ids, reason."""
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    if not stream:
        choices = response.json()["choices"]
        return [(text_of(one), one["token_ids"], one["finish_reason"]) for one in choices]
    found = {}
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for one in json.loads(line[6:])["choices"]:
            text, ids, reason = found.get(one["index"], ("", [], None))
            assert reason is None
            ids = ids + one.get("token_ids", [])
            found[one["index"]] = text + text_of(one), ids, one["finish_reason"]
    return [found[index] for index in sorted(found)]


@pytest.fixture(params=[completions, chat], ids=["completions", "chat"])
def ask(request, server):
    def both(**asked):
        whole = request.param(server, **asked)
        seeded = "seed" in asked or asked.get("temperature") == 0
        if seeded:
            assert request.param(server, **asked, stream=True) == whole
        return whole

    return both


def test_a_stop_string_that_begins_in_one_token_and_ends_in_another(server, ask):
    text = "The quick brown fox sees the lazy dog"
    tokenizer = server.service.tokenizer
    pieces = [tokenizer.decode([id]) for id in tokenizer.encode(text, special=False)]
    assert "".join(pieces) == text
    borders = [len("".join(pieces[:at])) for at in range(1, len(pieces))]
    crossing = [at for at in borders if text.index(text[at - 1 : at + 1]) == at - 1]
    assert len(crossing) > 2
    with scripted(server, text):
        for at in crossing[:3]:
            stop = text[at - 1 : at + 1]
            asked = dict(temperature=0, max_tokens=40)
            [(cut, _, reason)] = ask(**asked, stop=["zzz", stop])
            assert (cut, reason) == (text[: at - 1], "stop")
            [(kept, _, _)] = ask(**asked, stop=stop, include_stop_str_in_output=True)
            assert kept == text[: at + 1]


def test_what_makes_the_choice_certain(ask):
    [greedy] = ask(temperature=0, ignore_eos=True)
    for certain in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}):
        assert ask(temperature=2, ignore_eos=True, seed=5, **certain) == [greedy]
    assert ask(temperature=2, ignore_eos=True, seed=5) != [greedy]
    assert ask(temperature=2, ignore_eos=True, seed=5, top_k=-1, min_p=0) == ask(
        temperature=2, ignore_eos=True, seed=5
    )


def test_seeds_and_several_answers(ask):
    asked = dict(temperature=1.5, n=3, ignore_eos=True)
    first = ask(**asked, seed=7)
    assert first == ask(**asked, seed=7) != ask(**asked, seed=8)
    assert len({text for text, _, _ in first}) > 1


def test_the_end_of_the_text_and_what_puts_it_off(ask):
    ends = {str(EOS): 100}  # the end is by far the likeliest
    [(text, ids, reason)] = ask(temperature=0, logit_bias=ends)
    assert (text, ids, reason) == ("", [EOS], "stop")
    [(_, ids, reason)] = ask(temperature=0, logit_bias=ends, min_tokens=5)
    assert (len(ids), ids[-1], reason) == (6, EOS, "stop")
    assert EOS not in ids[:5]
    [(_, ids, reason)] = ask(temperature=0, logit_bias=ends, ignore_eos=True)
    assert (ids, reason) == ([EOS] * 12, "length")
    [(_, ids, reason)] = ask(temperature=0, logit_bias={"65": 100}, stop_token_ids=[65])
    assert (ids, reason) == ([65], "stop")
    [(_, ids, _)] = ask(temperature=0, logit_bias={"65": 100, "66": 99}, frequency_penalty=2)
    assert set(ids) == {65, 66}  # each time it comes, it becomes less likely


def test_usage_grows_with_every_chunk_of_a_chat(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        server.client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
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


def test_a_lower_priority_runs_first(tiny_folder):
    with live_server.live(tiny_folder, max_num_seqs=1) as server:
        threads = []

        def go(name, priority):
            body = {"prompt": name, "max_tokens": 3, "priority": priority}
            headers = {"x-request-id": name}
            answer = server.http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200

        with server.held():
            for count, (name, priority) in enumerate(
                [("first", 0), ("late", 9), ("soon", -3), ("next", 1)], start=1
            ):
                threads.append(threading.Thread(target=go, args=(name, priority)))
                threads[-1].start()
                wait_until(lambda count=count: server.service.admission.inside == count)
        for thread in threads:
            thread.join(30)
        # By the server's own clock: which client is told first is the operating system's choice. Whether the first was
        # running already when the engine stood still is nobody's.
        computed = sorted(
            server.http.get("/cairn/requests").json()["requests"], key=_first_computed
        )
        order = [request["id"] for request in computed if request["id"] != "first"]
        assert order == ["soon", "next", "late"]
        server.at_rest()


def _first_computed(request):
    prefill = next(span for span in request["spans"] if span["name"] == "prefill")
    return request["began"] + prefill["start_s"]


def test_a_request_that_says_nothing_is_sampled_as_the_model_says(server, monkeypatch):
    """Through OpenAI's client, and the doors of Ollama and llama.cpp; what a request does say counts."""
    greedy = completions(server, temperature=0)
    assert completions(server, temperature=1.5, seed=3) != greedy
    said = chat(server, temperature=0)[0][0]
    monkeypatch.setattr(server.service.serving, "sampling", {"temperature": 0.0})
    create = server.client.chat.completions.create
    for asked in ({}, {"temperature": None}, {"top_p": 0.9, "seed": 5}):
        answer = create(model="tiny", messages=MESSAGES, max_tokens=12, **asked)
        assert answer.choices[0].message.content == said
    different = create(model="tiny", messages=MESSAGES, max_tokens=12, temperature=1.5, seed=3)
    assert different.choices[0].message.content != said
    assert completions(server) == greedy
    response = server.client.responses.create(
        model="tiny", input="Once upon a time", max_output_tokens=16
    )
    assert response.temperature == 0
    llama = {"prompt": "Once upon a time", "n_predict": 12}
    assert server.http.post("/completion", json=llama).json()["content"] == greedy[0][0]
    shown = server.http.get("/props").json()["default_generation_settings"]["params"]
    assert (shown["temperature"], shown["top_k"]) == (0.0, 40)
    ollama = {
        "model": "tiny",
        "messages": MESSAGES,
        "stream": False,
        "options": {"num_predict": 12},
    }
    assert server.http.post("/api/chat", json=ollama).json()["message"]["content"] == said
