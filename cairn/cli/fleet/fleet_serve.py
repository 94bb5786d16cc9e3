"""`cairn fleet serve FILE`: servers and a router, until they are stopped."""

import os
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from cairn.core.config import load
from cairn.core.errors import UsageError

MOST_PROCESSES, MOST_PORT = 64, 65535


class FleetServe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Start the servers of a fleet file and a router in front of them. See docs/fleet.md for the file.

    Ctrl-C and SIGTERM let running requests finish; SIGHUP reads the file again. A server that dies is started again,
    and its requests go on elsewhere.
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """a TOML file, such as examples/fleet/local.toml"""
    port: Annotated[int, msgspec.Meta(ge=0, le=MOST_PORT)] | None = None
    """port of the router, instead of the file's; 0 takes a free one"""
    keda: str | None = None
    """HOST:PORT where KEDA's external scaler is answered, by gRPC; needs cairn-stack[keda]"""
    endpoint_picker: str | None = None
    """HOST:PORT where Envoy asks for the server of a request (ext_proc); needs cairn-stack[gateway]"""
    processes: int = 1
    """of the router, on one port; for more requests than one processor can pass on"""
    policy: str | None = None
    """how servers are chosen, instead of the file's: see `cairn simulate fleet --help`"""
    watch: bool = False
    """read the file again whenever it has changed, as SIGHUP does; a wrong one changes nothing"""


def run(args: list[str]) -> int:
    options = load(
        FleetServe, args=args, env_prefix="CAIRN_FLEET_SERVE_", prog="cairn fleet serve"
    ).value
    if not 1 <= options.processes <= MOST_PROCESSES:
        raise UsageError(f"--processes is {options.processes}", hint=f"1 to {MOST_PROCESSES}")
    from cairn.fleet.config import FleetConfig, read_fleet

    def read() -> FleetConfig:
        config = read_fleet(options.file)
        changes = {"port": options.port, "policy": options.policy}
        given = {key: value for key, value in changes.items() if value is not None}
        return msgspec.structs.replace(
            config, router=msgspec.structs.replace(config.router, **given)
        )

    config = read()
    from cairn.fleet.serve import Listeners, run_fleet

    listeners = Listeners(
        keda=options.keda, picker=options.endpoint_picker, processes=options.processes
    )
    run_fleet(config, read, _gpus(), listeners, options.file if options.watch else None)
    return 0


def _gpus() -> list[str]:
    """GPUs that the servers may use, named as in CUDA_VISIBLE_DEVICES."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name for name in allowed.split(",") if name]
    from cairn.hw.gpus import read_gpus

    found, _ = read_gpus(Path("/"))
    return [str(at) for at in range(len(found))]
