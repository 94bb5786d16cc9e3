"""`cairn chat` with real models: behind our own server, and in its own process."""

import io
import os
import signal
import threading

import live_server
import pytest

from cairn.cli.chat.chat_client import Ending, Piece, ServerTalker
from cairn.cli.chat.chat_local import LocalTalker
from cairn.cli.chat.chat_loop import Chat
from cairn.cli.chat.chat_state import Conversation, Sampling
from cairn.cli.chat.chat_terminal import Terminal
from cairn.cli.main import main
from cairn.core.errors import CairnError, RequestError, TokenizerError, UsageError
from cairn.serve.http.server.keys import Keys

ASK = [{"role": "user", "content": "Hello"}]
GREEDY = Sampling(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def local(tiny_folder):
    made = LocalTalker(
        str(tiny_folder), device="cpu", dtype="float32", num_gpu_blocks_override=64, max_num_seqs=2
    )
    yield made
    made.close()


def text_of(pieces):
    return "".join(one.text for one in pieces if isinstance(one, Piece))


def at_rest(talker):
    live_server.wait_until(lambda: not talker._llm.serving.engine.engine.has_work)
    assert talker._llm.serving.engine.engine.scheduler.blocks.usage().used == 0


def test_here_and_behind_a_server_the_answer_is_the_same(server, local):
    talker = ServerTalker(server.url)
    assert talker.model == "tiny"
    for messages in (ASK, [*ASK, {"role": "assistant", "content": "Yes?"}, *ASK]):
        near, far = list(local.answer(messages, GREEDY)), list(talker.answer(messages, GREEDY))
        reference = server.client.chat.completions.create(
            model="tiny", messages=messages, temperature=0, max_tokens=24
        )
        assert text_of(near) == text_of(far) == reference.choices[0].message.content
        assert near[-1] == far[-1]
        assert far[-1] == Ending(
            reference.choices[0].finish_reason,
            reference.usage.prompt_tokens,
            reference.usage.completion_tokens,
        )
    at_rest(local)


def test_leaving_an_answer_ends_the_request_on_the_server(server):
    pieces = ServerTalker(server.url).answer(ASK, Sampling(temperature=0.0))
    next(pieces)
    pieces.close()
    server.at_rest()


def test_leaving_an_answer_ends_the_request_here(local):
    pieces = local.answer(ASK, Sampling(temperature=0.0))
    next(pieces)
    pieces.close()
    at_rest(local)
    assert text_of(local.answer(ASK, GREEDY))


def test_ctrl_c_in_a_wait_ends_the_request_and_keeps_the_chat(local, monkeypatch):
    """The engine stands still until the signal has come, so it is certain what is interrupted."""
    gate, engine = threading.Event(), local._llm.serving.engine.engine
    step = engine.step

    def gated():
        gate.wait(30)
        return step()

    monkeypatch.setattr(engine, "step", gated)
    chat = Chat(local, Terminal(io.StringIO()), Conversation(), GREEDY)
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    answered = chat.ask("Hello")
    timer.join()
    gate.set()
    assert answered.finish_reason == "stopped"
    assert answered.text == ""
    at_rest(local)
    assert chat.ask("Hello").text == text_of(local.answer(ASK, GREEDY))


def test_a_chat_that_is_too_long_says_both_numbers_and_what_to_do(server, local):
    long = [{"role": "user", "content": "word " * 400}]
    with pytest.raises(RequestError, match="160") as here:
        list(local.answer(long, GREEDY))
    assert "/clear" in here.value.hint
    with pytest.raises(CairnError, match=r"400: .*160") as there:
        list(ServerTalker(server.url).answer(long, GREEDY))
    assert "/clear" in there.value.hint


def test_thoughts_are_apart(agent):
    with live_server.scripted(agent, "<think>\nHm, yes.</think>\n\nGood day"):
        pieces = list(ServerTalker(agent.url).answer(ASK, Sampling()))
    thoughts = "".join(p.text for p in pieces if isinstance(p, Piece) and p.kind == "reasoning")
    said = "".join(p.text for p in pieces if isinstance(p, Piece) and p.kind == "answer")
    assert (thoughts, said) == ("Hm, yes.", "Good day")


def test_a_key_that_is_needed(tiny_folder, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("CAIRN_API_KEY", raising=False)
    with live_server.live(tiny_folder, Keys([("me", "sk-right")])) as guarded:
        flags = ["chat", "--url", guarded.url, "--prompt", "hi", "--max-tokens", "2"]
        assert main(flags) == 2
        assert "401" in (said := capsys.readouterr().err)
        assert "CAIRN_API_KEY" in said
        monkeypatch.setenv("CAIRN_API_KEY", "sk-right")
        assert main(flags) == 0
        assert "sk-right" not in "".join(capsys.readouterr())


def test_models(server, local):
    with pytest.raises(UsageError, match="no model 'other'"):
        ServerTalker(server.url).use("other")
    assert list(ServerTalker(server.url, model="other").answer(ASK, GREEDY))  # it has but one
    with pytest.raises(UsageError, match="itself"):
        local.use("other")


def test_a_model_without_words_has_nothing_to_say():
    with pytest.raises(TokenizerError, match="no tokenizer"):
        LocalTalker("random:tiny", device="cpu", dtype="float32", num_gpu_blocks_override=64)


# -- templates ------------------------------------------------------------------------------------

OWN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def test_a_server_with_a_template_of_its_own_and_one_that_trusts_its_clients(
    tiny_folder, server, tmp_path
):
    file = tmp_path / "own.jinja"
    file.write_text(OWN)
    asked = {"messages": [{"role": "user", "content": "Hi"}]}
    own = asked | {"chat_template": OWN}

    def tokens(one, body):
        found = one.http.post("/tokenize", json=body)
        return found.json().get("tokens", found.json().get("error"))

    plain = server.service.tokenizer.encode("[Hi]", special=False)
    with live_server.live(
        tiny_folder, chat_template=file, trust_request_chat_template=True
    ) as other:
        assert tokens(other, asked) == plain
        assert tokens(other, asked | {"chat_template": "{{ messages[0].content }}"}) == plain[1:-1]
        whole = other.http.post(
            "/v1/chat/completions", json=own | {"max_tokens": 1, "return_token_ids": True}
        )
        assert whole.json()["prompt_token_ids"] == plain
        broken = other.http.post("/v1/chat/completions", json=own | {"chat_template": "{% for"})
        assert (broken.status_code, broken.json()["error"]["type"]) == (
            400,
            "invalid_request_error",
        )
    assert tokens(server, asked) != plain
    for path in ("/tokenize", "/v1/chat/completions"):
        refused = server.http.post(path, json=own)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "chat_template"
