"""The whole HTTP server of this project over an engine that only keeps time, on loopback, for labs.

    with paced(rows=8, step_s=0.01) as server:        listens on a free port
        post(server.url, prompt="...", max_tokens=16)
        get(server.url + "/cairn/requests?limit=5")

Answers are made up; everything in front of the device is real: sockets, parsing, tokenizer, scheduler, streaming.
"""

import json
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cairn.bench.paced_server import PacedServer

PATIENCE_S = 20.0


def paced(rows: int, step_s: float) -> "PacedServer":
    from cairn.bench.paced_server import PacedServer
    from cairn.models.runnable import open_model
    from cairn.serve.engine.request import Limits

    opened = open_model("cairn-tiny")
    limits = Limits(
        rows=rows,
        step_tokens=1024,
        context=512,
        pages=1 + rows * 33,
        page_size=16,
        vocabulary=opened.spec.vocab,
    )
    return PacedServer(opened, limits, lambda step: step_s, max_waiting=1024)


def post(url: str, **body: Any) -> Any:
    """One completion, whole."""
    asked = json.dumps({"model": "paced", "ignore_eos": True} | body).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", asked, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return json.load(response)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
        return json.load(response)
