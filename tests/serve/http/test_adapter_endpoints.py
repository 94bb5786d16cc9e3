"""Adapters over HTTP: the model field chooses, they come and go while the server runs, pages are nobody else's."""

import shutil

import live_server
import pytest
import tiny_adapters

from cairn.core.errors import ConfigError
from cairn.models.adapter.spec import AdapterSpec
from cairn.serve.adapter_folder import AdapterFolder, places_in
from cairn.serve.http.server.settings import ServerConfig

PROMPT = "Once upon a time there was a small cat who liked to sit in the sun"


@pytest.fixture(scope="module")
def folders(tiny_folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("legal", "poems")):
        tiny_adapters.write(tiny_folder, AdapterSpec(rank=2 + seed), root / name, seed)
    return root


def answer(server, model):
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    }
    return server.http.post("/v1/completions", json=body)


def text(server, model):
    return answer(server, model).json()["choices"][0]["text"]


def test_names_choose(tiny_folder, folders):
    modules = [f"legal={folders / 'legal'}"]
    with live_server.live(tiny_folder, lora_modules=modules, admin_endpoints=True) as server:
        post = server.http.post
        base, legal = text(server, "tiny"), text(server, "legal")
        assert base != legal
        assert text(server, "tiny") == base  # not from pages of the adapter
        cards = server.http.get("/v1/models").json()["data"]
        assert [(card["id"], card.get("parent")) for card in cards] == [
            ("tiny", None),
            ("legal", "tiny"),
        ]
        chat = {"model": "legal", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert post("/v1/chat/completions", json=chat).json()["model"] == "legal"
        load = {"lora_name": "poems", "lora_path": str(folders / "poems")}
        assert answer(server, "poems").status_code == 404
        assert post("/v1/load_lora_adapter", json=load).status_code == 200
        assert text(server, "poems") not in (base, legal)
        assert (
            "served already" in post("/v1/load_lora_adapter", json=load).json()["error"]["message"]
        )
        again = load | {"load_inplace": True, "lora_path": str(folders / "legal")}
        assert post("/v1/load_lora_adapter", json=again).status_code == 200
        assert text(server, "poems") == legal
        absent = post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/absent"})
        assert (absent.status_code, absent.json()["error"]["code"]) == (400, "adapter_not_loaded")
        assert post("/v1/unload_lora_adapter", json={"lora_name": "poems"}).status_code == 200
        assert answer(server, "poems").status_code == 404
        assert post("/v1/unload_lora_adapter", json={"lora_name": "tiny"}).status_code == 404
        assert text(server, "legal") == legal


def test_a_folder_is_followed(tiny_folder, folders, tmp_path):
    watched = tmp_path / "adapters"
    watched.mkdir()
    shutil.copytree(folders / "legal", watched / "legal")
    (watched / "broken").mkdir()
    with live_server.live(tiny_folder, adapters=watched) as server:
        assert list(server.service.serving.models) == ["tiny", "legal"]
        refused = server.http.post("/v1/unload_lora_adapter", json={"lora_name": "legal"})
        assert refused.json()["error"]["code"] == "admin_endpoints_off"
        shutil.copytree(folders / "poems", tmp_path / "poems")
        (watched / "poems").mkdir()  # as a run has it
        (tmp_path / "poems").rename(watched / "poems" / "adapter")
        assert list(places_in(watched / "poems" / "adapter")) == ["poems"]
        live_server.wait_until(lambda: "poems" in server.service.serving.models)
        legal, poems = text(server, "legal"), text(server, "poems")
        shutil.rmtree(watched / "legal")
        shutil.copy(folders / "legal" / "adapter_config.json", watched / "broken")
        live_server.wait_until(lambda: "legal" not in server.service.serving.models)
        assert text(server, "poems") == poems != legal


def test_names_of_folders(folders, tmp_path):
    run, many = tmp_path / "tales", tmp_path / "many"
    shutil.copytree(folders / "legal", run / "adapter")
    assert list(places_in(run)) == list(places_in(run / "adapter")) == ["tales"]
    shutil.copytree(folders / "poems", many / "adapter")
    (many / "newest").symlink_to(run)
    (many / "stories").symlink_to(run / "adapter")
    found = places_in(many)  # their own names, so that no two are the same
    assert list(found) == ["adapter", "newest", "stories"]
    assert found["newest"] == many / "newest" / "adapter"


def test_an_adapter_that_goes_while_it_is_read_stops_nobody(folders, tmp_path, caplog):
    for name in ("legal", "poems"):
        shutil.copytree(folders / name, tmp_path / "many" / name)

    served = []

    class Loads:
        def load_adapter(self, name, folder, replace=False):
            if name == "legal":
                raise FileNotFoundError(folder)
            served.append(name)

    shutil.copytree(folders / "poems", tmp_path / "many/pickled")
    (tmp_path / "many/pickled/adapter_model.safetensors").rename(tmp_path / "many/adapter.bin")
    followed = AdapterFolder(tmp_path / "many", Loads())
    followed.scan()
    followed.scan()
    assert served == ["poems"]
    assert "the adapter legal is not served" in caplog.text
    assert caplog.text.count("the adapter pickled is not served") == 1
    shutil.rmtree(tmp_path / "many")  # what is served stays: a disk may come back
    followed.scan()
    followed.scan()
    assert caplog.text.count("cannot be listed") == 1


def test_settings():
    with pytest.raises(ConfigError, match="NAME=PATH"):
        ServerConfig(model="m", lora_modules=["legal"])
    with pytest.raises(ConfigError, match="adapters are given"):
        ServerConfig(model="m", role="prefill", lora_modules=["a=b"])
