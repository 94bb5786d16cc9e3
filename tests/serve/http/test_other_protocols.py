"""The interfaces of llama.cpp's server and of Ollama: their requests, their documents, the same text as everywhere."""

import json
import re

import live_server

from cairn.serve.http.protocol.sampling import NEUTRAL

SAID = [{"role": "user", "content": "Once"}]
GREEDY = {"temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def events(text):
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def expected(server, **body):
    return server.client.completions.create(model="tiny", temperature=0, **body).choices[0]


# -- llama.cpp ------------------------------------------------------------------------------------


def test_completion_is_the_text_of_completions(server):
    body = {"prompt": "Once", "n_predict": 20, **GREEDY}
    found = server.http.post("/completion", json=body | {"return_tokens": True}).json()
    wanted = expected(server, prompt="Once", max_tokens=20)
    assert found["content"] == wanted.text
    assert (found["stop"], found["stop_type"], found["model"]) == (True, "limit", "tiny")
    assert (
        found["tokens_predicted"] == len(found["tokens"]) == found["timings"]["predicted_n"] == 20
    )
    assert found["tokens_evaluated"] == found["timings"]["prompt_n"] > 0
    assert found["timings"]["cache_n"] == found["tokens_cached"] == 0
    assert found["timings"]["predicted_ms"] >= 0

    *pieces, last = events(server.http.post("/completion", json=body | {"stream": True}).text)
    assert "".join(piece["content"] for piece in pieces) == wanted.text
    assert not any(piece["stop"] for piece in pieces)
    assert (last["stop"], last["content"], last["tokens_predicted"]) == (True, "", 20)
    none = server.http.post("/completion", json=body | {"n_predict": 0, "stream": True}).text
    [only] = events(none)
    assert (only["content"], only["tokens_predicted"], only["timings"]["predicted_n"]) == ("", 0, 0)


def test_probabilities_of_each_token_are_those_of_completions(server):
    body = {"prompt": "Once", "n_predict": 9, "n_probs": 3, **GREEDY}
    rows = server.http.post("/completion", json=body).json()["completion_probabilities"]
    wanted = expected(server, prompt="Once", max_tokens=9, logprobs=3).logprobs
    assert [row["logprob"] for row in rows] == wanted.token_logprobs
    for row, top in zip(rows, wanted.top_logprobs, strict=True):
        assert [one["logprob"] for one in row["top_logprobs"]] == list(top.values())
        assert {key: row[key] for key in row["top_logprobs"][0]} == row["top_logprobs"][0]  # greedy
        assert bytes(row["bytes"]).decode("utf-8", "replace") == row["token"]
    pieces = events(server.http.post("/completion", json=body | {"stream": True}).text)
    streamed = [one for piece in pieces for one in piece.get("completion_probabilities", [])]
    assert [one["id"] for one in streamed] == [row["id"] for row in rows]
    assert "completion_probabilities" not in pieces[-1]
    plain = server.http.post("/completion", json=body | {"n_probs": 0}).json()
    assert "completion_probabilities" not in plain


def test_timings_count_what_was_computed_and_null_is_the_default(server):
    unset = dict.fromkeys(("seed", "stop", "stream", "presence_penalty", "t_max_predict_ms"))
    body = {"prompt": "A stone lay on a stone that lay on a stone.", "n_predict": 1, **unset}
    first, again = (server.http.post("/completion", json=body).json() for _ in range(2))
    assert again["tokens_cached"] > 0
    for found in (first, again):
        timed = found["timings"]
        assert timed["cache_n"] == found["tokens_cached"]
        assert timed["prompt_n"] == found["tokens_evaluated"] - found["tokens_cached"]


def test_a_time_limit_ends_an_answer_behind_a_whole_line(server):
    body = {"prompt": "Once", "t_max_predict_ms": 0.001}
    with live_server.scripted(server, "z\n" + "z" * 400):
        found = server.http.post("/completion", json=body).json()
        *pieces, last = events(server.http.post("/completion", json=body | {"stream": True}).text)
    for ended in (found, last):
        assert (ended["stop"], ended["stop_type"]) == (True, "limit")
        assert 2 <= ended["tokens_predicted"] < 400
    assert found["content"].startswith("z\n")
    assert "".join(piece["content"] for piece in pieces).startswith("z\n")
    with live_server.scripted(server, "z" * 20):  # no line is whole
        whole = server.http.post("/completion", json=body).json()
    assert (whole["content"], whole["stop_type"]) == ("z" * 20, "eos")


def test_tokens_with_their_pieces_add_up_to_the_text(server):
    text = "A stone 漢 🙂 <x>"
    asked = {"content": text, "with_pieces": True}
    found = server.http.post("/tokenize", json=asked).json()["tokens"]
    plain = server.http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert [one["id"] for one in found] == plain
    pieces = [one["piece"] for one in found]
    # Of a character that several tokens make.
    assert any(isinstance(piece, list) for piece in pieces)
    joined = b"".join(bytes(p) if isinstance(p, list) else p.encode() for p in pieces)
    assert joined.decode() == text


def test_completion_stops_follows_a_schema_and_reads_ids(server):
    text = expected(server, prompt="Once", max_tokens=20).text
    stop = text[6:8]
    body = {"prompt": "Once", "n_predict": 20, "stop": [stop], **GREEDY}
    found = server.http.post("/completion", json=body).json()
    assert (found["stop_type"], found["stopping_word"]) == ("word", stop)
    assert found["content"] == text[: text.index(stop)]
    shaped = {"prompt": "Once", "n_predict": 60, "json_schema": {"enum": ["a", "b"]}}
    assert json.loads(server.http.post("/completion", json=shaped).json()["content"]) in ("a", "b")
    ids = server.service.tokenizer.encode("Once")
    # Where there is no n_predict, max_tokens counts.
    again = server.http.post("/completion", json={"prompt": ids, "max_tokens": 20, **GREEDY}).json()
    assert again["content"] == text


def test_completion_follows_a_grammar_of_llama_cpp(server):
    body = {"prompt": "Once", "n_predict": 60, "grammar": 'root ::= ("ab" | "cd")+ "."'}
    found = server.http.post("/completion", json=body).json()
    assert re.fullmatch(r"(ab|cd)+\.?", found["content"])
    wrong = server.http.post("/completion", json=body | {"grammar": "root ::= roof"})
    assert wrong.status_code == 400
    assert "line 1: the rule 'roof' is not defined" in wrong.json()["error"]["message"]
    both = server.http.post("/completion", json=body | {"json_schema": {}})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "grammar")


def test_what_is_not_supported_is_refused_by_name(server):
    asked = dict.fromkeys(("logit_bias", "image_data", "lora", "n_indent", *NEUTRAL), 3)
    for field, value in (asked | {"post_sampling_probs": True}).items():
        if field in NEUTRAL:
            for path, prompt in (
                ("/v1/completions", {"prompt": "Once"}),
                ("/v1/chat/completions", {"messages": SAID}),
            ):
                found = server.http.post(path, json=prompt | {field: value})
                assert (found.status_code, found.json()["error"]["param"]) == (400, field)
        found = server.http.post("/completion", json={"prompt": "Once", field: value})
        assert (found.status_code, found.json()["error"]["param"]) == (400, field)
    off = NEUTRAL | {"top_n_sigma": -1.0, "typical_p": 1.0, "mirostat": None, "lora": []}
    body = {"prompt": "Once", "n_predict": 3} | off
    for path in ("/completion", "/v1/completions"):
        assert server.http.post(path, json=body).status_code == 200


def test_templates_props_and_slots(server):
    prompt = server.http.post("/apply-template", json={"messages": SAID}).json()["prompt"]
    assert prompt == "<|begin|>user: Once<|begin|>assistant: "
    assert server.http.post("/apply-template", json={}).status_code == 400
    props = server.http.get("/props").json()
    assert (props["total_slots"], props["model_alias"]) == (8, "tiny")
    assert props["default_generation_settings"]["n_ctx"] == live_server.CONTEXT
    assert "add_generation_prompt" in props["chat_template"]
    slots = server.http.get("/slots").json()
    assert [slot["id"] for slot in slots] == list(range(8))
    assert not any(slot["is_processing"] for slot in slots)


# -- a text with a gap ----------------------------------------------------------------------------


def test_the_text_between_two_others_is_asked_for_in_one_form_everywhere(agent):
    """/infill, `suffix` of /v1/completions, and Ollama's `suffix`: one prompt, one answer."""
    before, after = "def one():\n    return", "\n\nprint(one())"
    wanted = f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>"
    with live_server.scripted(agent, " 1"):
        body = {"input_prefix": before, "input_suffix": after, "prompt": " "}
        middle = agent.http.post("/infill", json=body).json()
        assert agent.last_prompt() == f"{wanted} "
        done = agent.client.completions.create(model="tiny", prompt=before, suffix=after)
        assert agent.last_prompt() == wanted
        ollama = {"model": "tiny", "prompt": before, "suffix": after, "stream": False}
        filled = agent.http.post("/api/generate", json=ollama).json()
        assert agent.last_prompt() == wanted
        extra = [{"filename": "two.py", "text": "x = 2"}]
        found = agent.http.post("/infill", json=body | {"input_extra": extra, "stream": True})
        *_, last = events(found.text)
        assert agent.last_prompt() == f"<|file_sep|>two.py\nx = 2\n{wanted} "
    assert middle["content"] == done.choices[0].text == filled["response"] == " 1"
    assert last["stop"] is True
    found = agent.http.post("/api/generate", json=ollama | {"system": "Be kind."})
    assert (found.status_code, "system and suffix" in found.json()["error"]) == (400, True)
    for body in ({"echo": True, "prompt": "a"}, {"prompt": [1, 2]}, {"prompt": ["a", "b"]}):
        found = agent.http.post("/v1/completions", json={"suffix": "b", **body})
        assert found.status_code == 400, body
    assert agent.http.post("/infill", json={"input_prefix": "a"}).status_code == 400


# -- Ollama ---------------------------------------------------------------------------------------


def test_chat_whole_and_streamed(server):
    answer = server.client.chat.completions.create(
        model="tiny", messages=SAID, max_tokens=20, temperature=0
    )
    wanted = answer.choices[0].message.content
    body = {
        "model": "tiny:latest",
        "messages": SAID,
        "options": {"temperature": 0, "num_predict": 20},
    }
    whole = server.http.post("/api/chat", json=body | {"stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": wanted}
    assert (whole["done"], whole["done_reason"], whole["model"]) == (True, "length", "tiny:latest")
    assert (whole["eval_count"], whole["prompt_eval_count"]) == (20, answer.usage.prompt_tokens)

    found = server.http.post("/api/chat", json=body)
    assert found.headers["content-type"] == "application/x-ndjson"
    *pieces, last = lines(found.text)
    assert len(pieces) > 5
    assert "".join(piece["message"]["content"] for piece in pieces) == wanted
    assert not any(piece["done"] for piece in pieces)
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 20)
    for ended in (whole, last):  # in nanoseconds, as whole numbers; the parts are within the whole
        parts = [ended[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")]
        assert all(type(part) is int for part in [*parts, ended["total_duration"]])
        assert sum(parts) <= ended["total_duration"] + 1


def test_a_last_message_of_the_assistant_is_the_beginning_of_the_answer(server):
    begun = [*SAID, {"role": "assistant", "content": "It is"}]
    chat = {"messages": begun, "continue_final_message": True, "max_tokens": 6, "temperature": 0}
    wanted = server.http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]
    options = {"temperature": 0, "num_predict": 6}
    body = {"model": "tiny", "messages": begun, "options": options, "stream": False}
    found = server.http.post("/api/chat", json=body).json()["message"]["content"]
    assert found == wanted["content"]
    loaded = server.http.post("/api/chat", json=body | {"messages": [], "stream": None}).json()
    assert (loaded["done_reason"], loaded["message"]["content"]) == ("load", "")


def test_ollama_gives_log_probabilities(server):
    asked = {"logprobs": True, "top_logprobs": 2}
    body = {"model": "tiny", "messages": SAID, "options": {"num_predict": 9, "temperature": 0}}
    said = server.client.chat.completions.create(
        model="tiny", messages=SAID, max_tokens=9, temperature=0, **asked
    )
    wanted = [one.model_dump() for one in said.choices[0].logprobs.content]
    whole = server.http.post("/api/chat", json=body | asked | {"stream": False}).json()
    streamed = lines(server.http.post("/api/chat", json=body | asked).text)
    assert whole["logprobs"] == wanted
    assert [row for line in streamed for row in line.get("logprobs", [])] == wanted
    plain = server.http.post("/api/chat", json=body | {"top_logprobs": 2, "stream": False}).json()
    assert "logprobs" not in plain
    raw = {"model": "tiny", "prompt": "x", "raw": True, "stream": False, "logprobs": True}
    [first, *_] = server.http.post("/api/generate", json=raw).json()["logprobs"]
    assert first["top_logprobs"] == []


def test_generate_with_the_template_and_raw(server):
    body = {"model": "tiny", "prompt": "Once", "options": {"temperature": 0, "num_predict": 12}}
    chat = server.http.post(
        "/api/chat",
        json={k: v for k, v in body.items() if k != "prompt"} | {"messages": SAID, "stream": False},
    ).json()
    templated = server.http.post("/api/generate", json=body | {"stream": False}).json()
    assert templated["response"] == chat["message"]["content"]
    raw = lines(server.http.post("/api/generate", json=body | {"raw": True}).text)
    wanted = expected(server, prompt="Once", max_tokens=12).text
    assert "".join(line["response"] for line in raw) == wanted
    loaded = server.http.post("/api/generate", json={"model": "tiny"}).json()
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")


def test_more_tokens_than_the_context_has_room_for_are_all_of_that_room(server):
    """As in llama.cpp and Ollama, whose clients send limits that know nothing of the context."""
    body = {"model": "tiny", "options": {"temperature": 0, "num_predict": 10**6}, "stream": False}
    asked = {
        "/api/chat": body | {"messages": SAID},
        "/api/generate": body | {"prompt": "Once", "raw": True},
        "/completion": {"prompt": "Once", "n_predict": 10**6, **GREEDY},
    }
    for path, body in asked.items():
        answer = server.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        counts = answer.json()
        told = counts.get("eval_count", counts.get("tokens_predicted"))
        read = counts.get("prompt_eval_count", counts.get("tokens_evaluated"))
        ended = counts.get("done_reason", counts.get("stop_type"))
        assert ended in ("stop", "eos") or told + read == live_server.CONTEXT


def test_formats(server):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    body = {"model": "tiny", "messages": SAID, "format": schema, "stream": False}
    assert json.loads(server.http.post("/api/chat", json=body).json()["message"]["content"])[
        "a"
    ] in (1, 2)
    started = server.http.post(
        "/api/generate",
        json={
            "model": "tiny",
            "prompt": "Once",
            "format": "json",
            "stream": False,
            "options": {"num_predict": 5},
        },
    ).json()
    assert started["response"].startswith("{")


def test_tools_and_thoughts(agent):
    tool = {"type": "function", "function": {"name": "look", "parameters": {
        "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}}  # fmt: skip
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
    body = {"model": "tiny", "messages": SAID, "tools": [tool]}
    with live_server.scripted(agent, call):
        whole = agent.http.post("/api/chat", json=body | {"stream": False}).json()
        *_, last = lines(agent.http.post("/api/chat", json=body).text)
    wanted = [{"function": {"name": "look", "arguments": {"at": "sky"}}}]
    assert whole["message"]["tool_calls"] == last["message"]["tool_calls"] == wanted
    with live_server.scripted(agent, "Hm.</think>Yes"):
        thought = agent.http.post(
            "/api/chat", json=body | {"think": True, "stream": False, "tools": None}
        ).json()
    assert (thought["message"]["thinking"], thought["message"]["content"]) == ("Hm.", "Yes")


def test_models_and_mistakes(server):
    (model,) = server.http.get("/api/tags").json()["models"]
    assert (model["name"], model["details"]["family"]) == ("tiny", "llama")
    shown = server.http.post("/api/show", json={"model": "tiny"}).json()
    assert shown["model_info"]["llama.context_length"] == live_server.CONTEXT
    assert shown["capabilities"] == ["completion"]  # its template shows no tools
    assert server.http.post("/api/show", json={"name": "tiny"}).json() == shown  # older clients
    assert server.http.get("/api/version").json()["version"]
    (loaded,) = server.http.get("/api/ps").json()["models"]
    assert (loaded["name"], loaded["size"], loaded["size_vram"]) == ("tiny", model["size"], 0)
    assert len(loaded["digest"]) == 64  # `ollama list` and `ollama ps` cut it
    assert loaded["digest"] == model["digest"]
    for path, body, status in (
        ("/api/show", {"model": "other"}, 404),
        ("/api/show", {}, 400),
        ("/api/pull", {"model": "other"}, 404),
        ("/api/generate", {"model": "tiny", "prompt": "x", "images": ["x"]}, 400),
        ("/api/chat", {"model": "tiny", "messages": SAID, "options": {"temperature": "hot"}}, 400),
        ("/api/chat", {"model": "tiny", "messages": SAID, "options": {"num_predict": "many"}}, 400),
        ("/api/chat", {"model": "tiny", "messages": [SAID[0] | {"images": ["x"]}]}, 400),
        ("/api/generate", {"model": "tiny", "prompt": "x", "suffix": "y"}, 400),
        ("/api/generate", {"model": "tiny", "prompt": "x", "raw": True, "system": "y"}, 400),
        ("/api/chat", {"model": "tiny", "messages": SAID, "top_logprobs": 21}, 400),
        ("/api/generate", {"model": "tiny", "prompt": "x", "format": {"type": "objekt"}}, 400),
    ):
        found = server.http.post(path, json=body)
        assert (found.status_code, list(found.json())) == (status, ["error"]), (body, found.text)
        assert isinstance(found.json()["error"], str)
