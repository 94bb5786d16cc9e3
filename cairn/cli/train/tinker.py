"""`cairn tinker`: a server of Tinker's training API over one base model. Trains nothing itself."""

import socket
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from cairn.core.config import load
from cairn.core.errors import ConfigError
from cairn.models.hub import TINY, resolve

PREFIX = "CAIRN_TINKER_"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class TinkerVerb(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Low-rank adapters of one base model, trained and sampled by programs that use Tinker's SDK.

    export TINKER_BASE_URL=http://127.0.0.1:8700 TINKER_API_KEY=tml-local, and run the program. Many training runs share
    one copy of the weights. What is saved are PEFT adapters in --out, which `cairn serve --adapters` takes.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = TINY
    """a folder, or a name: of the hub, or of a model that comes with Cairn"""
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8700
    """0: any that is free"""
    out: Path = Path("runs/tinker")
    """folder of saved weights"""
    device: str = "auto"
    max_rank: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 32
    """of an adapter; all adapters count 32 / max-rank"""
    max_model_len: Annotated[int, msgspec.Meta(ge=16)] = 2048
    """tokens of a sequence, in training and sampling"""
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1)] = 32
    """samples at a time"""
    api_key: str | None = None
    """what clients have to send; needed where others can reach the port"""


def run(args: list[str]) -> int:
    verb = load(TinkerVerb, args=args, env_prefix=PREFIX).value
    if verb.host not in LOOPBACK and verb.api_key is None:
        raise ConfigError(
            f"anybody who reaches {verb.host} could train and sample here",
            hint="set --api-key tml-..., or listen on 127.0.0.1",
        )
    resolve(verb.model)  # a wrong name is said before torch is loaded
    listener = _bound(verb.host, verb.port)
    import uvicorn

    from cairn.align.tinker.frontend import Frontend
    from cairn.align.tinker.routes import application
    from cairn.align.tinker.samplers import SAMPLING, own_folder
    from cairn.align.tinker.service import Service
    from cairn.align.tinker.shared_base import Settings, SharedBase

    names = ("model", "out", "device", "max_rank", "max_model_len", "max_num_seqs")
    base = SharedBase(Settings(**{name: getattr(verb, name) for name in names}))
    service = Service(base)
    port = listener.getsockname()[1]
    print(f"{verb.model} on {base.device}, adapters up to rank {verb.max_rank}", file=sys.stderr)
    print(
        f"export TINKER_BASE_URL=http://{verb.host}:{port} TINKER_API_KEY={verb.api_key or 'tml-local'}",
        file=sys.stderr,
        flush=True,
    )
    try:
        with own_folder(verb.out / SAMPLING) as folder:
            app = application(Frontend(service, verb.api_key, folder))
            config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
            uvicorn.Server(config).run(sockets=[listener])
    finally:
        service.close()
    return 0


def _bound(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as problem:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {problem.strerror}", hint="choose another --port"
        ) from None
