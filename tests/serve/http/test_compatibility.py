"""What clients of OpenAI, llama.cpp, Ollama and vLLM send as a matter of habit, and what each has to do here."""

import json
import re

import live_server
import pytest

SAID = [{"role": "user", "content": "Once"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "hear", "parameters": {"type": "object"}}}
LLAMA_GREEDY = {"temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
THINKS = "{% if enable_thinking is defined and not enable_thinking %}[no thought]{% endif %}"


def events(text):
    data = (line.removeprefix("data: ") for line in text.split("\n\n"))
    return [json.loads(line) for line in data if line.startswith("{")]


def chat(server, path="/v1/chat/completions", **fields):
    return server.http.post(path, json={"messages": SAID, "temperature": 0, **fields})


# -- options that were ignored --------------------------------------------------------------------


def test_a_schema_beside_json_object_is_followed(server):
    shape = {"type": "json_object", "schema": {"enum": ["a", "b"]}}
    said = chat(server, response_format=shape, max_tokens=40).json()["choices"][0]["message"]
    assert json.loads(said["content"]) in ("a", "b")
    for wrong in (123, {"type": 123}, {"type": "hiccup"}):
        refused = chat(server, response_format=shape | {"schema": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """Its template says that it was asked for no thought, and has tools."""
    template = (
        THINKS + "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + live_server.AGENT
    )
    folder = live_server.make_folder(tmp_path_factory.mktemp("thinker") / "model", template)
    with live_server.live(folder) as made:
        yield made
        made.at_rest()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "high"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL, OTHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "auto", "tools": [{"type": "function", "function": {"name": "hear"}}]}}},
    ],
)  # fmt: skip
def test_a_prompt_is_the_same_wherever_it_is_shown(thinker, options):
    with live_server.scripted(thinker, "Hm"):
        assert chat(thinker, **options).status_code == 200
        ids, prompt = thinker.last_ids(), thinker.last_prompt()
    asked = {"messages": SAID, **options}
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        assert thinker.http.post(path, json=asked).json()["input_tokens"] == len(ids)
    assert thinker.http.post("/tokenize", json=asked).json()["tokens"] == ids
    assert thinker.http.post("/apply-template", json=asked).json()["prompt"] == prompt
    off = options.get("reasoning_effort") == "none" or "chat_template_kwargs" in options
    assert prompt.startswith("[no thought]") == off
    assert ("[look]" in prompt) == (options.get("tools") == [TOOL] and "tool_choice" not in options)
    assert ("[hear]" in prompt) == (OTHER in options.get("tools", []))


def test_efforts_and_roles_that_nobody_knows_are_refused(server):
    for path in ("/v1/chat/completions", "/apply-template"):
        refused = chat(server, path, reasoning_effort="banana").json()["error"]
        assert refused["param"] == "reasoning_effort"
        assert '"minimal" or "none"' in refused["message"]
        robot = [{"role": "robot", "content": "Hi"}]
        refused = server.http.post(path, json={"messages": robot}).json()["error"]
        assert "messages[0].role is 'robot'; it has to be system" in refused["message"]


def test_a_body_that_is_not_utf8_is_told_so(server):
    for body in (b'{"messages": [{"role": "user", "content": "\xff"}]}', b'{"messages": "\xff"}'):
        refused = server.http.post("/v1/chat/completions", content=body)
        assert refused.status_code == 400
        at = body.index(b"\xff")
        assert f"0xff at byte {at} is not UTF-8" in refused.json()["error"]["message"]


def test_the_names_of_llama_cpp_count_on_openais_paths(server):
    own = chat(server, max_tokens=9, repetition_penalty=1.7).json()
    named = chat(server, n_predict=9, repeat_penalty=1.7, mirostat=0, dry_multiplier=0.0).json()
    assert named["choices"] == own["choices"]
    assert named["usage"]["completion_tokens"] <= 9
    plain = chat(server, max_tokens=9).json()
    assert plain["choices"] != own["choices"]


# -- limits of answers ----------------------------------------------------------------------------


def test_a_limit_beyond_the_context_means_all_of_it_and_is_told(server):
    prompt = chat(server, max_tokens=1).json()["usage"]["prompt_tokens"]
    room = live_server.CONTEXT - prompt
    for limit in (room, 32000, -1):
        found = chat(server, max_tokens=limit, ignore_eos=True)
        assert found.json()["usage"]["completion_tokens"] == room
        cut = found.headers.get("x-cairn-max-tokens")
        assert cut == (str(room) if limit == 32000 else None)
    streamed = chat(server, max_tokens=32000, stream=True)
    assert streamed.headers["x-cairn-max-tokens"] == str(room)
    for field in ("max_tokens", "max_completion_tokens"):
        refused = chat(server, **{field: 0})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    few = chat(server, max_tokens=-1, min_tokens=live_server.CONTEXT).json()["error"]
    assert few["param"] == "min_tokens"
    text = {"prompt": [5, 5], "ignore_eos": True}
    whole = server.http.post("/v1/completions", json=text | {"max_tokens": -1}).json()["usage"]
    assert whole["total_tokens"] == live_server.CONTEXT
    asked = {"model": "tiny", "messages": SAID, "max_tokens": 32000}
    assert server.http.post("/v1/messages", json=asked).headers["x-cairn-max-tokens"] == str(room)


def test_a_prompt_that_is_too_long_is_told_in_the_words_of_each(server):
    long = {"messages": [{"role": "user", "content": "x " * 400}]}
    theirs = server.http.post("/chat/completions", json=long)
    openais = server.http.post("/v1/chat/completions", json=long)
    for found, kind in ((theirs, "exceed_context_size_error"), (openais, "invalid_request_error")):
        error = found.json()["error"]
        assert (found.status_code, error["type"]) == (400, kind)
        assert error["code"] == "context_length_exceeded"
        assert (error["n_prompt_tokens"] > 400, error["n_ctx"]) == (True, live_server.CONTEXT)


# -- paths ----------------------------------------------------------------------------------------


def test_paths_without_their_prefix(server):
    asked = {"messages": SAID, "temperature": 0, "max_tokens": 5}
    without, own = (
        server.http.post(path, json=asked).json()["choices"]
        for path in ("/chat/completions", "/v1/chat/completions")
    )
    assert without == own
    said = {"input": "Once", "temperature": 0, "max_output_tokens": 5}
    without, own = (
        server.http.post(path, json=said).json()["usage"]
        for path in ("/responses", "/v1/responses")
    )
    assert without == own
    counted = server.http.post("/responses/input_tokens", json=said).json()
    assert counted == {"input_tokens": own["input_tokens"], "object": "response.input_tokens"}
    assert server.http.get("/models").json() == server.http.get("/v1/models").json()
    for path in ("/v1/health", "/ping"):
        assert server.http.get(path).json()["status"] == "ok"
    assert server.http.get("/load").json() == {"server_load": 0}
    # llama.cpp's /completions is not OpenAI's.
    text = server.http.post("/completions", json={"prompt": "Once", "n_predict": 5, **LLAMA_GREEDY})
    wanted = server.client.completions.create(model="x", prompt="Once", max_tokens=5, temperature=0)
    assert text.json()["content"] == wanted.choices[0].text
    vectors = server.http.post("/v1/embeddings", json={"input": ["Once", "upon"]}).json()["data"]
    assert (
        server.http.post("/embeddings", json={"input": ["Once", "upon"]}).json()["data"] == vectors
    )
    theirs = server.http.post("/embedding", json={"content": ["Once", "upon"]}).json()
    assert [one["embedding"][0] for one in theirs] == [one["embedding"] for one in vectors]


def test_ollamas_version_and_context(server):
    version = server.http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    for raw in ({}, {"raw": True}):
        asked = {
            "model": "tiny",
            "stream": False,
            "options": {"temperature": 0, "num_predict": 6},
            **raw,
        }
        first = server.http.post("/api/generate", json=asked | {"prompt": "Once"}).json()
        assert ("context" in first) == (not raw)
        before = first.get("context", [7, 9])
        with live_server.scripted(server, "Hm"):
            server.http.post("/api/generate", json=asked | {"prompt": "more", "context": before})
            continued = server.last_ids()
        if not raw:
            with live_server.scripted(server, "Hm"):
                server.http.post("/api/generate", json=asked | {"prompt": "more"})
                alone = server.last_ids()
        else:
            alone = server.service.tokenizer.encode("more", special=False)
        assert continued == before + alone


# -- tools ----------------------------------------------------------------------------------------


def test_no_tools_with_a_choice_and_the_allowed_ones(thinker):
    for choice in ("auto", "none"):
        assert chat(thinker, tools=[], tool_choice=choice, max_tokens=2).status_code == 200
    assert chat(thinker, tools=[], tool_choice="required").status_code == 400
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "hear"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    message = chat(thinker, tools=[TOOL, OTHER], tool_choice=choice).json()["choices"][0]["message"]
    assert {call["function"]["name"] for call in message["tool_calls"]} == {"hear"}
    for wrong in ({"mode": "always"}, {"tools": "hear"}, {"tools": [{"name": "see"}]}):
        refused = chat(
            thinker, tools=[TOOL], tool_choice=choice | {"allowed_tools": allowed | wrong}
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    flat = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "hear"}],
    }
    asked = {
        "input": "Hi",
        "tools": [{"type": "function", **one["function"]} for one in (TOOL, OTHER)],
    }
    response = thinker.http.post("/v1/responses", json=asked | {"tool_choice": flat}).json()
    assert {item["name"] for item in response["output"]} == {"hear"}


# -- pages of other origins -----------------------------------------------------------------------


def preflight(server, origin, host=None):
    asked = {"origin": origin, "access-control-request-method": "POST",
             "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    headers = asked if host is None else asked | {"host": host}
    return server.http.options("/v1/chat/completions", headers=headers)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_pages_of_this_machine_may_call(server, host):
    origin = f"http://{host}:3000"
    allowed = preflight(server, origin)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == origin
    assert allowed.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "access-control-allow-credentials" not in allowed.headers
    for answer in (
        server.http.get("/v1/models", headers={"origin": origin}),
        server.http.post("/v1/chat/completions", json={}, headers={"origin": origin}),
        server.http.post(
            "/v1/completions", json={"prompt": "x", "stream": True}, headers={"origin": origin}
        ),
    ):
        assert answer.headers["access-control-allow-origin"] == origin
        assert answer.headers["vary"] == "origin"


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://evil.example", None),
        ("http://localhost.evil.example", None),
        ("http://notlocalhost:3000", None),
        ("http://127.0.0.1.evil.example", None),
        ("http://[::1", None),
        ("null", None),
        ("file://", None),
        ("http://localhost:3000", "evil.example:8000"),  # a name that resolves to loopback
    ],
)
def test_pages_from_elsewhere_may_not(server, origin, host):
    assert "access-control-allow-origin" not in preflight(server, origin, host).headers
    headers = {"origin": origin} | ({} if host is None else {"host": host})
    assert (
        "access-control-allow-origin" not in server.http.get("/v1/models", headers=headers).headers
    )


def test_pages_may_not_call_a_server_that_runs_more_than_the_model(tiny_folder):
    with live_server.live(tiny_folder, admin_endpoints=True) as server:
        assert "access-control-allow-origin" not in preflight(server, "http://localhost:3").headers


# -- llama.cpp's own ------------------------------------------------------------------------------


def completion(server, **fields):
    asked = {"prompt": "Once", "n_predict": 8, **LLAMA_GREEDY, **fields}
    return server.http.post("/completion", json=asked)


def test_prompts_in_every_form(server):
    tokenizer = server.service.tokenizer
    ids, more = tokenizer.encode("Once"), tokenizer.encode(" upon", special=False)
    one = completion(server).json()
    assert isinstance(one, dict)
    several = completion(server, prompt=["Once", ids, {"prompt_string": "Once"}]).json()
    assert [each["content"] for each in several] == [one["content"]] * 3
    assert [each["index"] for each in several] == [0, 1, 2]
    mixed = completion(server, prompt=["Once", *more]).json()
    joined = completion(server, prompt=ids + more).json()
    assert (mixed["content"], mixed["tokens_evaluated"]) == (joined["content"], len(ids + more))
    streamed = events(completion(server, prompt=["Once", ids + more], stream=True).text)
    texts = ["".join(e["content"] for e in streamed if e["index"] == at) for at in (0, 1)]
    assert texts == [one["content"], joined["content"]]
    assert [event["index"] for event in streamed if event["stop"]] == [0, 1]
    for wrong in ([], [[]], {}, {"prompt_string": 3}, [1.5], [True, "x", {}], [["x", {}]], ["x"] * 200,
                  {"prompt_string": "x", "multimodal_data": ["x"]}):  # fmt: skip
        refused = completion(server, prompt=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt"), wrong


def test_biases_in_every_form(server):
    tokenizer, plain = server.service.tokenizer, completion(server, return_tokens=True).json()
    first = plain["tokens"][0]
    text = tokenizer.decode([first])
    forms = [{str(first): -100}, [[first, -100]], [[first, False]]]
    if tokenizer.encode(text, special=False) == [first]:
        forms += [{text: -100}, [[text, False]]]
    found = [completion(server, logit_bias=form, return_tokens=True).json() for form in forms]
    assert all(first not in one["tokens"] for one in found)
    assert len({one["content"] for one in found}) == 1
    assert found[0]["generation_settings"]["logit_bias"] == [{"token": first, "bias": -100.0}]
    assert completion(server, logit_bias=[]).json()["content"] == plain["content"]
    for wrong in (
        3,
        [[1]],
        [[1, True]],
        [[1, "x"]],
        {"5": None},
        [[None, 1]],
        [[1.5, 1]],
        [[10**6, 1]],
    ):
        refused = completion(server, logit_bias=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logit_bias"), wrong


def test_what_an_answer_was_made_with(server):
    found = completion(server, seed=7, stop=["zzz"], temperature=0.5, top_k=3).json()
    settings = found["generation_settings"]
    assert (settings["n_predict"], settings["seed"], settings["stop"]) == (8, 7, ["zzz"])
    assert (settings["temperature"], settings["top_k"], settings["mirostat"]) == (0.5, 3, 0)
    assert found["has_new_line"] == ("\n" in found["content"])
    assert found["truncated"] is False
    timed = found["timings"]
    assert timed["predicted_per_token_ms"] * 8 == pytest.approx(timed["predicted_ms"])
    full = completion(server, n_predict=-1, ignore_eos=True).json()
    assert full["truncated"] is True
    assert full["tokens_evaluated"] + full["tokens_predicted"] == live_server.CONTEXT
    fields = ["content", "generation_settings/n_predict", "timings/nothing", "no/thing"]
    few = completion(server, response_fields=fields).json()
    assert few == {
        "content": completion(server).json()["content"],
        "generation_settings/n_predict": 8,
    }


def test_timings_and_progress_of_a_chat(server):
    whole = chat(server, max_tokens=6, ignore_eos=True).json()
    assert whole["timings"]["predicted_n"] == whole["usage"]["completion_tokens"] == 6
    assert re.match("b", whole["system_fingerprint"])
    text = server.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 6}).json()
    assert (
        text["timings"]["prompt_n"] + text["timings"]["cache_n"] == text["usage"]["prompt_tokens"]
    )
    asked = dict(max_tokens=6, ignore_eos=True, stream=True)
    every = events(chat(server, timings_per_token=True, return_progress=True, **asked).text)
    counts = [event["timings"]["predicted_n"] for event in every if "timings" in event]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len(counts) > 1
    read = [event["prompt_progress"] for event in every if "prompt_progress" in event]
    assert read[0]["processed"] == read[0]["cache"]
    assert read[1]["processed"] == read[1]["total"] == whole["usage"]["prompt_tokens"]
    plain = events(chat(server, **asked).text)
    assert ["timings" in event for event in plain] == [False] * (len(plain) - 1) + [True]
