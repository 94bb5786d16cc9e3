"""Weights in place over HTTP: pause, load, resume; answers are those of a server that was started with them."""

import threading

import live_server
import pytest
from safetensors.torch import load_file, save_file

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
        post = server.http.post
        before = text(server)
        assert before != wanted
        asleep = post("/sleep")
        assert (asleep.status_code, asleep.json()["error"]["code"]) == (409, "not_asleep")
        assert text(server) == before  # it goes on
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
        for body in (
            {"source": "x"},
            {"version": 0, "source": "x"},
            {"version": 2},
            {"version": 2, "source": {}},
        ):
            assert post("/update_weights", json=body).status_code == 400


def test_they_are_absent_without_the_flag(server):
    for path in ("/pause", "/resume", "/update_weights", "/reset_prefix_cache"):
        refused = server.http.post(path, json={"version": 1, "source": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            404,
            "admin_endpoints_off",
        )
