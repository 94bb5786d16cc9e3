"""`cairn serve`: a model behind OpenAI's HTTP interface, until it is stopped.

Says what was chosen and why, then the address. SIGTERM and Ctrl-C let running requests finish.
"""

import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro

from cairn.core.config import load
from cairn.core.units import format_duration
from cairn.models.hub import AUTO, default_model
from cairn.serve.http.server.settings import ServerConfig

if TYPE_CHECKING:
    from cairn.serve.serving import Serving


class Serve(ServerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serve a model over HTTP: chat, completions, tokens, health and metrics, as OpenAI's clients expect.

    MODEL is a folder in Hugging Face's format, a .gguf file, owner/name on the hub, the name of a packaged model
    (smollm2-135m-instruct, cairn-tiny), or random:SHAPE for a shape such as qwen3-0.6b with random weights. Without it,
    smollm2-135m-instruct is served where its package is installed, else cairn-tiny, which comes with Cairn.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = AUTO
    """a path or a name, see above"""
    config: Path | None = None
    """a TOML file with any of these settings"""


def run(args: list[str]) -> int:
    options = load(Serve, args=args, env_prefix="CAIRN_SERVE_", file_field="config").value
    if options.model == AUTO:
        default = default_model()
        options = msgspec.structs.replace(options, model=default.name)
        print(default.why, file=sys.stderr, flush=True)
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(levelname)s: %(message)s"
    )
    # Imported late: torch takes seconds, which a wrong flag should not have to wait for.
    from cairn.labs import learn_routes
    from cairn.serve.http.server.lifecycle import serve
    from cairn.web import site

    began = time.perf_counter()

    def print_ready(address: str, serving: "Serving") -> None:
        for note in serving.notes:
            print(note, file=sys.stderr)
        took = format_duration(time.perf_counter() - began)
        print(
            f"ready after {took}: {', '.join(options.names)} at {address}",
            file=sys.stderr,
            flush=True,
        )

    serve(options, print_ready, more=[*site.routes(), *learn_routes.routes()])
    print("stopped", file=sys.stderr)
    return 0
