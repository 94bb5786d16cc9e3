"""The shape of any model on a hub: its config.json is fetched, and nothing else of it."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cairn.cli.main import main

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 4096, "hidden_size": 256,
    "num_hidden_layers": 11, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 768, "max_position_embeddings": 1024, "rms_norm_eps": 1e-06, "hidden_act": "silu",
    "rope_theta": 10000.0, "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    """One repository of one small file; everything that is asked for is written down."""

    def do_HEAD(self):
        self.answer(b"")

    def do_GET(self):
        self.answer(json.dumps(CONFIG).encode())

    def answer(self, body):
        self.server.asked.append(self.path)
        found = self.path == "/some/model/resolve/main/config.json"
        size = len(json.dumps(CONFIG).encode())
        self.send_response(200 if found else 404)
        if found:
            self.send_header("etag", '"1234"')
            self.send_header("x-repo-commit", "0" * 40)
        else:
            self.send_header("x-error-code", "RepoNotFound")
            body = b""
        self.send_header("content-length", str(size if found else 0))
        self.end_headers()
        self.wfile.write(body if found else b"")

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    made = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    made.asked = []
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def shape(hub, name, home):
    """In a process of its own: the hub's client reads its address once."""
    code = (
        f"from cairn.plan.model_shape import model_shape; print(model_shape({name!r}).spec.layers)"
    )
    env = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100
    )


def test_only_the_config_of_a_repository_is_fetched(hub, tmp_path):
    ran = shape(hub, "some/model", tmp_path)
    assert ran.stdout.strip() == "11", ran.stderr
    fetched = {path for path in hub.asked if "/resolve/" in path}
    assert fetched == {"/some/model/resolve/main/config.json"}
    hub.asked.clear()
    missing = shape(hub, "some/other", tmp_path)
    assert missing.returncode == 1
    assert "does not exist on the hub" in missing.stderr


def test_without_a_hub_the_planner_says_what_it_knows(capsys):
    assert main(["plan", "serve", "some/unheard-of"]) == 2
    assert "cannot be reached" in capsys.readouterr().err
