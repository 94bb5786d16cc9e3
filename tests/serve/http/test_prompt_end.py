"""No text of the prompt comes out with the answer, on any endpoint: prompts here end with a byte token, \\n.

Tokenizers made by SentencePiece spell characters that they lack, and \\n, as bytes. Their text is known only when the
run of bytes has ended, which may be after the prompt has.
"""

import json

import anthropic
import live_server
import pytest
import shared_data
from live_server import scripted

from cairn import LLM, SamplingParams
from cairn.cli.chat.generate import Shown
from cairn.serve.answer import Answer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
SAID = [{"role": "user", "content": "Hi"}]
PROMPT = "hello\n"
ANSWERS = ["Hey 世界\n42", "\n\nok\n"]
GREEDY = {"temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "bytes"
    return live_server.make_folder(path, TEMPLATE, 256, byte_fallback=True)


@pytest.fixture(scope="module")
def server(folder):
    with live_server.live(folder) as made:
        assert made.service.tokenizer.token(made.service.tokenizer.encode(PROMPT)[-1]) == "<0x0A>"
        yield made


def spelled(tokenizer, text):
    """A token for each character, or one for each of its bytes."""
    ids = []
    for char in text.replace(" ", "▁"):
        id = tokenizer.backend.token_to_id(char)
        of_bytes = [tokenizer.id(f"<0x{byte:02X}>") for byte in char.encode()]
        ids += of_bytes if id is None else [id]
    return ids


def events(answer):
    answer.raise_for_status()
    lines = [line.removeprefix("data:").strip() for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def of_chat(server, stream):
    body = {"model": "tiny", "messages": SAID, "logprobs": True, "stream": stream}
    documents = events(server.http.post("/v1/chat/completions", json=body))
    choices = [document["choices"][0] for document in documents]
    tokens = [one for c in choices if c["logprobs"] for one in c["logprobs"]["content"]]
    said = "".join(c["delta" if stream else "message"].get("content") or "" for c in choices)
    assert b"".join(bytes(one["bytes"]) for one in tokens).removesuffix(b"</s>") == said.encode()
    return said


def of_completions(server, stream):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "stream": stream, "logprobs": 0}
    choices = [
        c for d in events(server.http.post("/v1/completions", json=body)) for c in d["choices"]
    ]
    rows = [c["logprobs"] for c in choices if c["logprobs"]]
    offsets = [at for row in rows for at in row["text_offset"]]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    return "".join(c["text"] for c in choices)


def of_echo(server, stream):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "stream": stream, "echo": True}
    documents = events(server.http.post("/v1/completions", json=body))
    said = "".join(choice["text"] for document in documents for choice in document["choices"])
    assert said.startswith(PROMPT)
    return said.removeprefix(PROMPT)


def of_messages(server, stream):
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        asked = {"model": "tiny", "max_tokens": 60, "messages": SAID}
        if not stream:
            return client.messages.create(**asked).content[0].text
        with client.messages.stream(**asked) as running:
            return "".join(running.text_stream)


def of_responses(server, stream):
    found = server.client.responses.create(model="tiny", input="Hi", stream=stream)
    if not stream:
        return found.output_text
    return "".join(event.delta for event in found if event.type == "response.output_text.delta")


def of_ollama_chat(server, stream):
    body = {"model": "tiny", "messages": SAID, "stream": stream}
    return "".join(
        one["message"]["content"] for one in events(server.http.post("/api/chat", json=body))
    )


def of_ollama_generate(server, stream):
    body = {"model": "tiny", "prompt": PROMPT, "raw": True, "stream": stream}
    return "".join(one["response"] for one in events(server.http.post("/api/generate", json=body)))


def of_llamacpp(server, stream):
    body = {"prompt": PROMPT, "stream": stream, "n_predict": 60}
    return "".join(one["content"] for one in events(server.http.post("/completion", json=body)))


def of_a_message_that_goes_on(server, stream):
    """The prompt ends inside of the answer."""
    begun = {"role": "assistant", "content": "Well\n"}
    body = {"model": "tiny", "messages": [*SAID, begun], "stream": stream}
    documents = events(
        server.http.post("/v1/chat/completions", json=body | {"continue_final_message": True})
    )
    parts = [document["choices"][0]["delta" if stream else "message"] for document in documents]
    return "".join(part.get("content") or "" for part in parts)


ENDPOINTS = [
    of_chat, of_completions, of_echo, of_messages, of_responses, of_ollama_chat, of_ollama_generate, of_llamacpp,
    of_a_message_that_goes_on,
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_answer_is_what_the_model_said(server, endpoint, stream):
    for text in ANSWERS:
        with scripted(server, spelled(server.service.tokenizer, text)):
            assert endpoint(server, stream) == text


def test_the_end_of_the_prompt_is_no_stop_string(server):
    create = server.client.completions.create
    with scripted(server, spelled(server.service.tokenizer, "ab\ncd")):
        choice = create(model="tiny", prompt=PROMPT, max_tokens=60, stop=["\n"]).choices[0]
    assert (choice.text, choice.finish_reason) == ("ab", "stop")


def test_an_answer_keeps_to_its_shape(server):
    def said(**body):
        body |= {"model": "tiny", "messages": SAID, "max_tokens": 60}
        [document] = events(server.http.post("/v1/chat/completions", json=body))
        return document["choices"][0]["message"]["content"]

    assert said(structured_outputs={"grammar": 'root ::= "a"{5}'}) == "aaaaa"
    assert said(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    schema = {"name": "x", "schema": {"const": "42"}}
    assert said(response_format={"type": "json_schema", "json_schema": schema}) == '"42"'
    body = {"prompt": PROMPT, "n_predict": 60, "grammar": 'root ::= "a"{5}'}
    assert server.http.post("/completion", json=body).json()["content"] == "aaaaa"


def test_a_begun_character_of_the_prompt_is_completed_or_left_out(server):
    tokenizer = server.service.tokenizer
    whole = tokenizer.encode("a") + spelled(tokenizer, "世")
    for said, text in (
        ([whole[-1], *spelled(tokenizer, "e")], "世e"),
        (spelled(tokenizer, "e"), "e"),
    ):
        with scripted(server, said):
            asked = dict(model="tiny", prompt=whole[:-1], max_tokens=60, logprobs=1)
            choice = server.client.completions.create(**asked).choices[0]
        assert choice.text == text
        assert choice.logprobs.text_offset[0] == 0


def test_an_answer_that_moves_is_the_same(server):
    """Another server goes on with it, behind any of its tokens."""
    tokenizer = server.service.tokenizer
    prompt, ids = tokenizer.encode(PROMPT), spelled(tokenizer, ANSWERS[0])
    for at in range(len(ids) + 1):
        answer = Answer(0, SamplingParams(), tokenizer, prompt)
        answer.begin(ids[:at])
        answer.push_all(ids[at:])
        answer.end("length")
        assert answer.result().text == ANSWERS[0]


def test_the_terminal_shows_the_answer_alone(server, capsys):
    tokenizer = server.service.tokenizer
    show = Shown(tokenizer, tokenizer.encode(PROMPT), quiet=False)
    for id in spelled(tokenizer, ANSWERS[0]):
        show.push(id)
    show.end()
    assert show.text == ANSWERS[0]
    assert capsys.readouterr().out == ANSWERS[0] + "\n"


def test_a_real_model_of_gguf():
    """Its tokens of the answer were recorded; their text is the vocabulary's."""
    with LLM(
        shared_data.model_folder("stories260K.gguf"),
        dtype="float32",
        device="cpu",
        num_gpu_blocks_override=32,
        load_in_advance=False,
    ) as llm:
        [found] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4))
        output = found.outputs[0]
        assert (output.token_ids, output.text) == ([436, 440, 411, 422], '"Hey')
