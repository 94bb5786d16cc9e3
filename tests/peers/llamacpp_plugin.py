"""A pytest plugin for llama.cpp's own tests of its server: what they start is Cairn, in a thread of their process.

Their `ServerProcess` has a field for each flag of llama-server. Those with a counterpart here become settings of a
server, the others are left out; tests that need a model which is not here, or the router, are skipped. Outcomes are
written to CAIRN_PEER_OUTCOMES as JSON. CAIRN_PEER_MODEL is the path of stories260K.gguf.
"""

import json
import os
import sys
import tempfile
import threading
import types
from pathlib import Path

import pytest

sys.modules.setdefault("wget", types.ModuleType("wget"))  # with which they fetch models
OUTCOMES: dict[str, str] = {}
STORIES = ("ggml-org/test-model-stories260K", "ggml-org/models")
DEFAULTS = {"temperature": 0.8}


class CairnServer:
    """One server in a thread, on a free port of loopback."""

    def __init__(self, asked) -> None:
        from cairn.serve.http.server.keys import Keys
        from cairn.serve.http.server.lifecycle import Server, bind, open_server
        from cairn.serve.http.server.service import Service
        from cairn.web.site import routes

        config = settings_of(asked)
        serving = open_server(config)
        if asked.temperature != DEFAULTS["temperature"]:  # --temp
            serving.sampling = {**serving.sampling, "temperature": asked.temperature}
        bound = bind(config)
        keys = Keys([("peer", asked.api_key)]) if asked.api_key else Keys()
        self.server = Server(Service(config, serving, keys), more=routes())
        asked.server_host, asked.server_port = bound.getsockname()[:2]
        self.thread = threading.Thread(target=self.server.run, args=([bound],), daemon=True)
        self.thread.start()
        while not self.server.started:
            self.thread.join(0.01)
            if not self.thread.is_alive():
                raise RuntimeError("the server ended before it started")

    def close(self) -> None:
        self.server.stop()
        self.thread.join(60)


def settings_of(asked):
    """Their fields as a configuration of Cairn; a prompt and its answer share what llama.cpp calls a slot."""
    from cairn.serve.http.server.settings import ServerConfig

    slots = asked.n_slots or 1
    context = asked.n_ctx if asked.kv_unified else (asked.n_ctx or 512) // slots
    names = sorted(asked.model_alias.split(",")) if asked.model_alias else ["stories260K.gguf"]
    return ServerConfig(
        model=os.environ["CAIRN_PEER_MODEL"],
        device="cpu",
        port=asked.__dict__.get("server_port", 0),  # of its own, where it is started again
        served_model_name=names,
        max_model_len=context,
        max_num_seqs=slots,
        num_gpu_blocks_override=64 * (slots + 1),
        drain_timeout=1.0,
        chat_template=template_of(asked),
    )


def template_of(asked):
    """--reasoning on and off, which servers have no flag for here, are said by the template itself."""
    if asked.chat_template_file and asked.reasoning in ("on", "off"):
        thinks = "true" if asked.reasoning == "on" else "false"
        source = Path(asked.chat_template_file).read_text()
        return template_file(f"{{% set enable_thinking = {thinks} %}}{source}")
    if asked.chat_template_file:
        return Path(asked.chat_template_file)
    if not asked.chat_template or asked.chat_template == "chatml":
        return None
    if " " not in asked.chat_template and "{" not in asked.chat_template:
        raise RuntimeError(f"there is no built-in template {asked.chat_template}")
    return template_file(asked.chat_template)


def template_file(source):
    file = Path(tempfile.mkdtemp(dir=os.environ["CAIRN_PEER_SCRATCH"])) / "template.jinja"
    file.write_text(source)
    return file


def start(self, timeout_seconds=60) -> None:
    if self.models_dir or self.models_preset or self.model_hf_repo is None:
        pytest.skip("needs llama.cpp's router")
    if self.model_hf_repo not in STORIES or (self.model_hf_file or "stories260K") not in (
        "stories260K",
        "tinyllamas/stories260K.gguf",
    ):
        pytest.skip(f"needs the model {self.model_hf_repo} {self.model_hf_file or ''}")
    import utils

    self.cairn = CairnServer(self)
    utils.server_instances.add(self)


def stop(self) -> None:
    import utils

    utils.server_instances.discard(self)
    if (server := getattr(self, "cairn", None)) is not None:
        self.cairn = None
        server.close()


def pytest_collection_modifyitems() -> None:
    import utils

    utils.ServerProcess.start, utils.ServerProcess.stop = start, stop
    utils.ServerPreset.load_all = staticmethod(lambda: None)


def pytest_runtest_logreport(report) -> None:
    if report.failed or report.when == "call" or (report.when == "setup" and report.skipped):
        OUTCOMES[report.nodeid] = "failed" if report.failed else report.outcome


def pytest_sessionfinish() -> None:
    Path(os.environ["CAIRN_PEER_OUTCOMES"]).write_text(json.dumps(OUTCOMES))
