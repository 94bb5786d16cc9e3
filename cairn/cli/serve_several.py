"""`cairn serve A B C`: several models of one machine behind one address; those sleep that have no room."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cairn.core.errors import ConfigError
from cairn.core.units import parse_bytes
from cairn.serve.http.server.settings import ServerConfig

if TYPE_CHECKING:
    from cairn.cli.serve import Serve

HOSTS = ("model", "host", "port", "served_model_name", "enable_sleep_mode", "admin_endpoints")
ONE_MODEL = (
    "served_model_name",
    "adapters",
    "lora_modules",
    "chat_template",
    "slo",
    "capture",
    "batch_folder",
)
SHARE = 0.8  # of the machine's memory, that models have together


def run_several(options: "Serve") -> int:
    """Each model has a server with these options; the router has the address."""
    for name in ONE_MODEL:
        if getattr(options, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is for one model", hint="leave it out, or serve one model")
    from cairn.fleet.config import RouterConfig
    from cairn.fleet.serve_models import HostConfig, run_models
    from cairn.serve.http.server.keys import read_keys

    memory, on_gpu = _memory(options)
    config = HostConfig(
        [options.model, *options.more_models],
        [*_flags(options), *(["--enable-sleep-mode"] if on_gpu else [])],
        RouterConfig(
            host=options.host,
            port=options.port,
            hold_s=options.first_token_deadline,
            max_body_bytes=options.max_body_bytes,
        ),
        memory,
        options.model_idle_s,
        options.pin,
        on_gpu,
        bool(read_keys(options.api_key_file)),
    )
    run_models(config, lambda text: print(text, file=sys.stderr, flush=True))
    print("stopped", file=sys.stderr)
    return 0


def _memory(options: "Serve") -> tuple[int, bool]:
    """Total memory for the models, and whether it is GPU memory."""
    from cairn.hw.gpus import read_gpus
    from cairn.hw.host import read_memory

    found, _ = read_gpus(Path("/"))
    on_gpu = bool(found) and not options.device.startswith("cpu")
    if options.models_memory is not None:
        return parse_bytes(options.models_memory), on_gpu
    if on_gpu and found[0].memory_bytes:
        return int(found[0].memory_bytes * 0.95), True
    host = read_memory(Path("/"))[0]
    usable = host.usable_bytes
    if usable is None:
        raise ConfigError(
            "this machine does not say how much memory it has",
            hint="give --models-memory, such as 16GiB",
        )
    return int(usable * SHARE), False


def _flags(options: "Serve") -> list[str]:
    """The settings of a server that differ from its own, as flags."""
    defaults, found = ServerConfig(model="x"), list[str]()
    for name in ServerConfig.__struct_fields__:
        value = getattr(options, name)
        if name not in HOSTS and value != getattr(defaults, name):
            found += _flag("--" + name.replace("_", "-"), value)
    return found


def _flag(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    values = value if isinstance(value, list) else [value]
    return [flag, *(str(msgspec.to_builtins(one, enc_hook=str)) for one in values)]
