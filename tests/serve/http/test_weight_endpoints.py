"""Weights in place over HTTP: pause, load, resume; answers are those of a server that was started with them."""

import threading

import live_server
import pytest
from safetensors.torch import load_file, save_file

from cairn.core.errors import CairnError

ASKED = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def other_folder(tiny_folder, tmp_path_factory):
    """The same model with its feed-forward weights flipped."""
    folder = tmp_path_factory.mktemp("models") / "other"
    folder.mkdir()
    for path in tiny_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tiny_folder / "model.safetensors")
    flipped = {
        name: value.flip(0).contiguous() if "mlp" in name else value
        for name, value in tensors.items()
    }
    save_file(flipped, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def text(server):
    return server.http.post("/v1/completions", json=ASKED).json()["choices"][0]["text"]


@pytest.mark.parametrize("engine_in", ["thread", "process"])
def test_new_weights_serve_after_a_pause(tiny_folder, other_folder, engine_in):
    with live_server.live(other_folder) as fresh:
        wanted = text(fresh)
    with live_server.live(
        tiny_folder, admin_endpoints=True, engine_in=engine_in, plain=True
    ) as server:
        post, get = server.http.post, server.http.get
        before = text(server)
        assert before != wanted
        for level in (1, 2):
            assert post(f"/sleep?level={level}").json()["status"] == "asleep"
            assert get("/is_sleeping").json()["is_sleeping"]
            assert get("/health").json()["status"] == "asleep"
            assert text(server) == before  # the request has woken it
            assert not get("/is_sleeping").json()["is_sleeping"]
        assert post("/pause", json={}).json() == {"status": "paused", "kept": True}
        found = []
        waiting = threading.Thread(target=lambda: found.append(text(server)))
        waiting.start()
        live_server.wait_until(lambda: server.service.open)
        refused = post("/update_weights", json={"version": 1, "source": "/absent/folder"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "weights_not_loaded")
        assert "/absent/folder" in refused.json()["error"]["message"]
        loaded = post("/update_weights", json={"version": 1, "source": str(other_folder)})
        assert (loaded.status_code, loaded.json()["version"]) == (200, 1)
        assert not found  # it waits
        assert server.http.get("/health").status_code == 200
        assert post("/reset_prefix_cache").json() == {"status": "ok"}
        assert post("/resume").json() == {"status": "running"}
        waiting.join(30)
        assert found == [wanted]
        assert text(server) == wanted
        assert post("/sleep").status_code == 200
        again = post("/update_weights", json={"version": 2, "source": str(other_folder)})
        assert again.status_code == 200  # it was woken for them
        if engine_in == "process":
            assert not server.service.serving.engine.client.asleep  # so the watchdog is awake, too
        assert text(server) == wanted
        for body in (
            {"source": "x"},
            {"version": 0, "source": "x"},
            {"version": 3},
            {"version": 3, "source": {}},
        ):
            assert post("/update_weights", json=body).status_code == 400


def test_a_server_that_streams_does_not_sleep_unless_it_may_abort(tiny_folder):
    with live_server.live(tiny_folder, admin_endpoints=True) as server:
        post = server.http.post
        assert post("/pause").status_code == 200  # so that the stream does not end meanwhile
        ends = []

        def stream():
            answer = server.http.post("/v1/completions", json={**ASKED, "stream": True})
            ends.append(answer.text)

        reader = threading.Thread(target=stream)
        reader.start()
        live_server.wait_until(lambda: server.service.open)
        refused = post("/sleep")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_asleep")
        assert "mode=abort" in refused.json()["error"]["message"]
        runner = server.service.serving.engine.engine.runner
        source, runner.source = runner.source, None
        assert post("/sleep?level=2&mode=abort").status_code == 409
        assert not ends  # what is impossible ends nobody's request
        assert server.service.open
        runner.source = source
        assert post("/sleep?mode=abort").json()["status"] == "asleep"
        reader.join(30)
        assert "abort" in ends[0]
        waiting = [threading.Thread(target=text, args=(server,)) for _ in range(3)]
        for one in waiting:
            one.start()
        live_server.wait_until(lambda: len(server.service.open) == 3 and not server.service.asleep)
        assert post("/resume").status_code == 200  # they have woken it, and it was paused before
        for one in waiting:
            one.join(30)
        assert not server.http.get("/is_sleeping").json()["is_sleeping"]
        wrong = ("/sleep?level=3", "/sleep?mode=x", "/sleep?lvel=1", "/wake_up?tags=weights")
        assert [post(path).status_code for path in wrong] == [400] * 4
        assert post("/wake_up").json()["status"] == "running"
        assert not server.service.paused


def test_a_server_that_cannot_wake_up_loads_no_weights_and_sleeps_on(tiny_folder, monkeypatch):
    def refuse():
        raise CairnError("the memory is somebody else's")

    with live_server.live(tiny_folder, admin_endpoints=True) as server:
        assert server.http.post("/sleep").json()["status"] == "asleep"
        with monkeypatch.context() as changed:
            changed.setattr(server.service.serving, "wake", refuse)
            asked = {"version": 1, "source": "/absent/folder"}
            refused = server.http.post("/update_weights", json=asked)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "still_asleep")
            assert server.http.get("/is_sleeping").json()["is_sleeping"]
        assert text(server)


def test_they_are_absent_without_the_flag(server):
    for path in ("/pause", "/resume", "/update_weights", "/reset_prefix_cache", "/sleep"):
        refused = server.http.post(path, json={"version": 1, "source": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            404,
            "admin_endpoints_off",
        )
