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
from cairn.core.garbage_collection import held_collector
from cairn.core.units import format_duration
from cairn.models.hub import AUTO, check_name, default_model
from cairn.serve.http.server.settings import ServerConfig

if TYPE_CHECKING:
    from cairn.serve.serving import Serving


class Serve(ServerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serve a model over HTTP: chat, completions, tokens, health and metrics, as OpenAI's clients expect.

    MODEL is a folder in Hugging Face's format, a .gguf file, owner/name on the hub, the name of a packaged model
    (smollm2-135m-instruct, cairn-tiny), or random:SHAPE for a shape such as qwen3-0.6b with random weights. Without it,
    smollm2-135m-instruct is served where its package is installed, else cairn-tiny, which comes with Cairn.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = AUTO
    """a path or a name, see above"""
    more_models: Annotated[
        list[str], tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL ...]")
    ] = msgspec.field(default_factory=list)
    """further models behind the same address, each a server of its own: those that do not fit into the memory together
    sleep, and wake up when they are asked for"""
    pin: list[str] = msgspec.field(default_factory=list)
    """of several models: names of those that never sleep"""
    model_idle_s: float = 300.0
    """of several models: seconds without a request after which a model sleeps"""
    models_memory: str | None = None
    """of several models: the memory that they share, such as 16GiB; default: the GPU's memory, or 0.8 of the host's"""
    slo: str | None = None
    """p99 to hold, such as ttft=500ms,tpot=25ms: sets --max-num-seqs, --step-ms and --max-waiting by simulating, on a
    GPU, and says why"""
    slo_lengths: str = "1024/256"
    """tokens in and out of the requests that --slo is for"""
    config: Path | None = None
    """a TOML file with any of these settings"""


def with_slo(options: Serve, slo: str) -> Serve:
    """The limits that hold this promise on the GPU of this machine; each is printed with its reason."""
    from cairn.plan import slo as planned

    wanted, lengths = planned.parse_slo(slo), planned.parse_lengths(options.slo_lengths)
    gpu = planned.device_called(gpu_name(options.device))
    from cairn.models.linear.registry import FORMS
    from cairn.models.runnable import spec_of
    from cairn.plan.serve_cost import Served
    from cairn.plan.weight_forms import weight_form

    served = Served(
        spec=spec_of(options.model, options.context),
        device=gpu,
        tp=options.tensor_parallel_size,
        weight_bytes=weight_form(options.weights if options.weights in FORMS else "", None).bytes,
    )
    chosen = planned.choose(served, wanted, lengths)
    for line in chosen.why:
        print(line, file=sys.stderr, flush=True)
    return msgspec.structs.replace(
        options,
        max_num_seqs=chosen.max_num_seqs,
        step_ms=chosen.step_ms,
        max_waiting=chosen.max_waiting,
    )


def gpu_name(device: str) -> str:
    """GPU name of the driver; empty without a GPU or for the CPU."""
    from cairn.hw.gpus import read_gpus

    if device == "cpu":
        return ""
    found, _ = read_gpus(Path("/"))
    at = int(device.partition(":")[2] or 0)
    return found[at].name if at < len(found) else ""


def run(args: list[str]) -> int:
    options = load(Serve, args=args, env_prefix="CAIRN_SERVE_", file_field="config").value
    if options.model == AUTO:
        default = default_model()
        options = msgspec.structs.replace(options, model=default.name)
        print(default.why, file=sys.stderr, flush=True)
    if options.more_models:
        from cairn.cli.serve_several import run_several

        return run_several(options)
    check_name(options.model)
    if options.slo is not None:
        options = with_slo(options, options.slo)
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(levelname)s: %(message)s"
    )
    began = time.perf_counter()

    def print_ready(address: str, serving: "Serving") -> None:
        for note in serving.notes:
            print(note, file=sys.stderr)
        took = format_duration(time.perf_counter() - began)
        print(
            f"ready after {took}: {', '.join(serving.models)} at {address}",
            file=sys.stderr,
            flush=True,
        )

    from cairn.serve.http.server.early_workers import start_early

    early = start_early(options)
    try:
        # Imported late: torch takes seconds, which a wrong flag should not have to wait for.
        with held_collector():
            from cairn.labs import learn_routes
            from cairn.serve.http.server.lifecycle import serve
            from cairn.web import site

        serve(options, print_ready, more=[*site.routes(), *learn_routes.routes()], early=early)
    finally:
        if early is not None:
            early.end()  # of what ended before anybody took them
    print("stopped", file=sys.stderr)
    return 0
