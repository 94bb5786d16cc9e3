"""Images through every chat interface: the same prompt, counted and refused with reasons; hosts are judged."""

import base64
import http.server
import io
import json
import random
import socket
import struct
import threading
import time
import zlib
from typing import ClassVar

import pytest

pytest.importorskip("PIL", reason="pictures are decoded by Pillow")
import live_server
import tiny_vision as tiny

from cairn.core.errors import RequestError
from cairn.models.vision.picture import MOST_BYTES, open_image
from cairn.serve import engine_processes
from cairn.serve.engine.messages import encode_submission
from cairn.serve.http.tools.generic_tools import in_first_message, in_system_message
from cairn.serve.media import decoder, fetch
from cairn.serve.media.fetch import MediaLoader, is_public
from cairn.serve.text_keys import prompt_keys, read_fields


def png(seed: int = 0) -> bytes:
    written = io.BytesIO()
    tiny.photograph(40, 30, seed).save(written, "PNG")
    return written.getvalue()


URL = "data:image/png;base64," + base64.b64encode(png()).decode()
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 8}
TEXT = {"type": "text", "text": "What?"}


@pytest.fixture(scope="module")
def seeing():
    with live_server.live(tiny.folder("llava"), num_gpu_blocks_override=128) as made:
        yield made
        made.at_rest()


def test_every_interface_gives_the_same_answer(seeing):
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}, TEXT]}]
    answer = seeing.client.chat.completions.create(messages=chat, **GREEDY)
    text, usage = answer.choices[0].message.content, answer.usage
    assert usage.prompt_tokens_details.to_dict()["image_tokens"] == 16
    assert usage.prompt_tokens == 16 + len("user: ()What?\n")
    given = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "What?"}]
    response = seeing.client.responses.create(
        model="tiny", input=[{"role": "user", "content": given}], temperature=0, max_output_tokens=8
    )
    assert response.output_text == text
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
    blocks = [{"type": "image", "source": source}, TEXT]
    asked = GREEDY | {"messages": [{"role": "user", "content": blocks}]}
    message = seeing.http.post("/v1/messages", json=asked).json()
    assert message["content"][0]["text"] == text
    ollama = {"role": "user", "content": "What?", "images": [URL.partition(",")[2]]}
    options = {"temperature": 0, "num_predict": 8}
    asked = {"model": "tiny", "messages": [ollama], "stream": False, "options": options}
    assert seeing.http.post("/api/chat", json=asked).json()["message"]["content"] == text
    asked = asked | {"prompt": "What?", "images": ollama["images"]}
    assert seeing.http.post("/api/generate", json=asked).json()["response"] == text


def test_pictures_stay_where_they_are_beside_tools_of_a_template_without_any():
    """Such tools are described in text around the parts of a message; no part becomes its own spelling."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    shown = [{"type": "image"}, TEXT]
    call = {"function": {"name": "look", "arguments": {}}}
    asked = [
        {"role": "user", "content": shown},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": shown},
    ]
    system, user, answer, result = in_system_message(asked, tools)
    assert "look" in system["content"]
    assert user["content"] == shown
    assert "look" in answer["content"]
    assert [part.get("type") for part in result["content"]] == ["text", "image", "text", "text"]
    first, *_ = in_first_message(asked, tools)
    assert "look" in first["content"][0]["text"]
    assert first["content"][1:] == shown


def test_a_picture_in_a_message_counts_for_a_router_by_its_digest():
    def keys(data: str):
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        body = {"model": "tiny", "messages": [{"role": "user", "content": [url, TEXT]}]}
        return prompt_keys(read_fields(json.dumps(body).encode()))

    large = "A" * 3_000_000
    one, same, other = keys(large), keys(large), keys(large[:-1] + "B")
    assert one.keys == same.keys != other.keys
    assert len(one.keys) == 1
    assert sum(map(len, one.parts)) < 300


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1/a.png", "are not fetched"),
        ("file:///etc/passwd", "is not loaded"),
        ("data:image/png;base64,AAAA", "cannot be read"),
        ("data:text/plain,hello", "has no base64"),
    ],
)
def test_what_cannot_be_loaded_is_a_400_with_the_reason(seeing, url, said):
    content = [{"type": "image_url", "image_url": {"url": url}}, TEXT]
    asked = GREEDY | {"messages": [{"role": "user", "content": content}]}
    response = seeing.http.post("/v1/chat/completions", json=asked)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


def asked_with(pictures: int) -> dict:
    shown = [{"type": "image_url", "image_url": {"url": URL}}] * pictures
    return GREEDY | {"messages": [{"role": "user", "content": [*shown, TEXT]}]}


def test_pictures_that_take_too_long_together_are_a_400_with_the_figures(seeing, monkeypatch):
    """Sixty-four round trips to a process take longer than a millisecond on any machine."""
    monkeypatch.setattr(decoder, "BUDGET_S", 0.001)
    response = seeing.http.post("/v1/chat/completions", json=asked_with(64))
    assert response.status_code == 400
    assert "a request may take 0.001 s" in response.json()["error"]["message"]
    monkeypatch.undo()
    assert seeing.http.post("/v1/chat/completions", json=asked_with(1)).status_code == 200


def test_pictures_are_encoded_for_an_engine_process_outside_of_the_event_loop(seeing, monkeypatch):
    wanted = seeing.http.post("/v1/chat/completions", json=asked_with(1)).json()["choices"]
    encoded = []

    def spied(submission):
        encoded.append((threading.current_thread(), bool(submission.pictures)))
        return encode_submission(submission)

    monkeypatch.setattr(engine_processes, "encode_submission", spied)
    folder = tiny.folder("llava")
    with live_server.live(folder, engine_in="process", num_gpu_blocks_override=128) as server:
        made = server.http.post("/v1/chat/completions", json=asked_with(1)).json()["choices"]
        assert made == wanted
        ((thread, has_pictures),) = encoded
        assert has_pictures
        assert thread is not server.thread


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("<image> is a word", "stands for pictures"),
        ([{"type": "input_audio", "input_audio": {}}], "input_audio"),
    ],
)
def test_messages_without_pictures_are_judged_alike(seeing, content, said):
    asked = GREEDY | {"messages": [{"role": "user", "content": content}]}
    response = seeing.http.post("/v1/chat/completions", json=asked)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


# -- hosts ----------------------------------------------------------------------------------------


PRIVATE = (
    "127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.1", "172.16.9.9", "100.64.0.1", "0.0.0.0",
    "::1", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "224.0.0.1",
    "64:ff9b:1::a00:1", "fec0::1", "::93.184.215.14",
    "not an address",
)  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_never_dialled(address):
    dialled = []
    loader = MediaLoader(["*"], lambda host, port: ["93.184.215.14", address], dialled.append)
    with pytest.raises(RequestError, match="no public address"):
        loader.load("http://pictures.example/a.png", "here")
    assert not is_public(address)
    assert not dialled


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/a",
        "http://good.example:8080/a",
        "http://u:p@good.example/a",
        "ftp://good.example/a",
        "http://good.example.evil.net/a",
        "http://[::1",
        "http://%00/",
    ],
)
def test_other_hosts_ports_and_schemes_are_refused(url):
    loader = MediaLoader(["good.example", "*.cdn.example"], lambda host, port: ["93.184.215.14"])
    loader._dial = lambda *_: pytest.fail("dialled")
    with pytest.raises(RequestError):
        loader.load(url, "here")


def test_redirects_are_judged_again_and_bodies_are_bounded():
    """A public name that leads to itself, to a private one, and to a body without end."""
    addresses = {"good.example": "93.184.215.14", "inside.example": "10.0.0.7"}
    with Pictures() as port:
        loader = MediaLoader(["*"], lambda host, _: [addresses[host]], to_port(port))
        assert loader.load("http://good.example/moved", "here") == png()
        with pytest.raises(RequestError, match=r"'inside\.example' has no public address"):
            loader.load("http://good.example/inside", "here")
        with pytest.raises(RequestError, match="redirects"):
            loader.load("http://good.example/round", "here")
        with pytest.raises(RequestError, match="more than"):
            loader.load("http://good.example/endless", "here")
        with pytest.raises(RequestError, match="status 404"):
            loader.load("http://good.example/nothing", "here")
        with pytest.raises(RequestError, match="leads to no URL"):
            loader.load("http://good.example/astray", "here")


def test_a_server_that_sends_a_byte_now_and_then_is_left(monkeypatch):
    monkeypatch.setattr(fetch, "MOST_SECONDS", 0.4)
    with Pictures() as port:
        loader = MediaLoader(["*"], lambda host, _: ["93.184.215.14"], to_port(port))
        for path in ("trickle", "trickled-body"):
            began = time.monotonic()
            with pytest.raises(RequestError, match="could not be fetched"):
                loader.load(f"http://good.example/{path}", "here")
            assert time.monotonic() - began < 5


def test_a_name_that_cannot_be_one_has_no_address():
    with pytest.raises(RequestError, match="has no public address"):
        MediaLoader(["*"]).load("http://a..b/", "here")


def to_port(port: int):
    return lambda address, _, timeout: socket.create_connection(("127.0.0.1", port), timeout)


class Pictures:
    """A server on loopback, for whoever is told that it is a public one."""

    def __enter__(self) -> int:
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self.server.server_address[1]

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    moves: ClassVar = {
        "/moved": "/a.png",
        "/inside": "http://inside.example/",
        "/round": "/round",
        "/astray": "http://[x",
    }

    def do_GET(self) -> None:
        if self.path in self.moves:
            self.send_response(302)
            self.send_header("Location", self.moves[self.path])
            self.end_headers()
            return
        if self.path == "/trickle":
            self.trickle(b"HTTP/1.0 200 OK\r\nX-Slow: " + b"x" * 100)
            return
        self.send_response(404 if self.path == "/nothing" else 200)
        if self.path == "/a.png":
            self.send_header("Content-Length", str(len(png())))
        self.end_headers()
        if self.path == "/trickled-body":
            self.trickle(bytes(100))
        elif self.path == "/a.png":
            self.wfile.write(png())
        elif self.path == "/endless":
            block = bytes(1 << 20)
            for _ in range(MOST_BYTES // len(block) + 2):
                try:
                    self.wfile.write(block)
                except OSError:
                    return

    def trickle(self, content: bytes) -> None:
        for at in range(len(content)):
            try:
                self.wfile.write(content[at : at + 1])
            except OSError:
                return
            time.sleep(0.1)

    def log_message(self, *words: object) -> None:
        return None


# -- hostile files --------------------------------------------------------------------------------


def test_damaged_files_are_refused_or_read_and_nothing_else():
    """Two hundred files of five formats with bytes changed, cut or repeated."""
    draw, read = random.Random(1), 0
    whole = []
    for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP"):
        written = io.BytesIO()
        tiny.photograph(24, 18).save(written, kind)
        whole.append(written.getvalue())
    for _ in range(200):
        damaged = bytearray(draw.choice(whole))
        for _ in range(draw.randint(1, 12)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        damaged = damaged[: draw.randint(1, len(damaged))] if draw.random() < 0.4 else damaged
        try:
            read += open_image(bytes(damaged)).mode == "RGB"
        except RequestError:
            continue
    assert 0 < read < 200


@pytest.mark.parametrize(
    ("size", "why"), [((40000, 40000), "1600000000|bomb|pixels"), ((9000, 3), "times as long")]
)
def test_bombs_are_refused_before_they_are_decoded(size, why):
    header = b"IHDR" + struct.pack(">IIBBBBB", *size, 1, 0, 0, 0, 0)
    checked = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    with pytest.raises(RequestError, match=why):
        open_image(b"\x89PNG\r\n\x1a\n" + checked + png()[33:])
