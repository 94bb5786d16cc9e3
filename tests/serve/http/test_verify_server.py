"""Evidence over HTTP: from this server, from one without echo, and from one that answers chats only."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import live_server
import msgspec
import pytest
import torch

from cairn.cli.main import main
from cairn.core.errors import CairnError
from cairn.models.runnable import open_model
from cairn.verify.ask import probes_of
from cairn.verify.check import ModelCheck
from cairn.verify.plain_path import PlainPath
from cairn.verify.probes import VerifyProbe
from cairn.verify.server_source import ServerClient, TokenIds, _completion, _echoed, from_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return live_server.make_folder(tmp_path_factory.mktemp("models") / "wide", context=768)


@pytest.fixture(scope="module")
def wide(folder):
    with live_server.live(folder, num_gpu_blocks_override=96, dtype="float32") as made:
        yield made


class Limited(BaseHTTPRequestHandler):
    """Passes requests on, and gives less back: no echo, as llama.cpp's own server; or no completions at all."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body.pop("echo", None)
        status, said = 404, b'{"error": {"message": "no such endpoint"}}'
        if not (self.server.chat_only and self.path.endswith("/v1/completions")):
            answer = self.server.behind.http.post(f"{self.server.behind.url}{self.path}", json=body)
            status, said = answer.status_code, answer.content
        self.send_response(status)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *args):
        pass


def limited(wide, chat_only):
    made = ThreadingHTTPServer(("127.0.0.1", 0), Limited)
    made.behind, made.chat_only = wide, chat_only
    threading.Thread(target=made.serve_forever, daemon=True).start()
    return made


def verdict_of(folder, evidence):
    opened = open_model(str(folder))
    path = PlainPath(opened.checkpoint.load("cpu", torch.float32))
    return ModelCheck(path, opened.spec, opened.tokenizer).verdict(evidence, "float32")


def test_a_server_that_echoes_gives_every_token_and_agrees(wide, folder):
    opened = open_model(str(folder))
    probes = probes_of(opened.spec, opened.tokenizer)
    evidence = from_server(ServerClient(wide.url), probes, opened.tokenizer)
    assert evidence.places > sum(len(probe.ids) - 1 for probe in probes if probe.name != "chat")
    assert verdict_of(folder, evidence).status == "agrees"


@pytest.mark.parametrize("chat_only", [False, True])
def test_a_server_that_gives_less_is_verified_by_its_answers(wide, folder, chat_only):
    opened = open_model(str(folder))
    probes = probes_of(opened.spec, opened.tokenizer)
    less = limited(wide, chat_only)
    try:
        url = f"http://127.0.0.1:{less.server_port}"
        evidence = from_server(ServerClient(url, wide.service.model), probes, opened.tokenizer)
    finally:
        less.shutdown()
        less.server_close()
    most = sum(12 if probe.name == "chat" else 48 for probe in probes)
    assert 6 <= evidence.places <= most
    assert ("prose" in [one.probe for one in evidence.observations]) is not chat_only
    assert verdict_of(folder, evidence).status == "agrees"


def test_the_verb_records_compares_and_leaves_with_a_status(wide, folder, tmp_path, capsys):
    record = tmp_path / "today.json"
    args = ["verify", str(folder), "--url", wide.url, "--json", "--device", "cpu"]
    assert main([*args, "--record", str(record)]) == 0
    assert main([*args, "--against", str(record)]) == 0
    out = capsys.readouterr().out
    compared = msgspec.json.decode(out[out.rindex('{\n  "verdict"') :])["compared"]
    assert compared["status"] == "same"
    config = json.loads((folder / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).symlink_to(file)
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert main(["verify", str(other), "--url", wide.url, "--device", "cpu"]) == 1
    assert "differs: norm epsilon" in capsys.readouterr().out
    # The engine here computes what the changed files say; what was recorded from the server does not.
    assert main(["verify", str(other), "--against", str(record), "--device", "cpu"]) == 1
    told = capsys.readouterr().out
    assert "against the record: differs" in told
    assert "the record has norm epsilon" in told


def test_a_server_that_cannot_be_reached_or_says_nothing_is_an_error(folder):
    with pytest.raises(CairnError, match="cannot ask"):
        ServerClient("http://127.0.0.1:9")


class Halves:
    """A vocabulary in which two tokens are halves of characters, which JSON spells alike."""

    vocab_size, bos_id = 4, None
    backend = type("Backend", (), {"token_to_id": staticmethod(lambda text: None)})

    def piece(self, id):
        return [b"a", b"b", b"\xe6", b"\x9d"][id]


@pytest.mark.parametrize("top", [{"\ufffd": -0.5, "a": -1.0, "b": -3.0}, {"a": -0.2, "b": -3.0}])
def test_a_place_whose_likeliest_token_cannot_be_told_is_left_out(top):
    """Else the second likeliest would pass for the likeliest, and a healthy server for another one."""
    logprobs = {"tokens": ["a", "b", "\ufffd"], "token_logprobs": [None, -3.0, -2.0]}
    logprobs["top_logprobs"] = [None, top, top]
    found = _completion({"choices": [{"logprobs": logprobs}]})
    ids = TokenIds(Halves())
    rows = _echoed(VerifyProbe("text", "", [0, 1, 2], 1, 0), found, ids).rows
    clear = max(top, key=top.get) == "a"
    assert [bool(row) for row in rows] == [clear, clear]
    if clear:
        assert rows[1] == {0: -0.2, 1: -3.0, 2: -2.0}


def test_a_server_with_another_tokenizer_is_told_and_counts_as_different(wide, capsys):
    """The tokens that it echoes are fewer than the model's, or others."""
    assert main(["verify", "cairn-tiny", "--url", wide.url, "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert "as other tokens than the model" in said
    assert "hint: it serves another model" in said
