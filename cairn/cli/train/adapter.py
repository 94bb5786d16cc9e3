"""`cairn adapter info|merge|export`: what an adapter is, a model with it folded in, and PEFT's folder of a run."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from cairn.cli.subverbs import Subverb, dispatch
from cairn.core.config import load
from cairn.core.errors import ConfigError

Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ADAPTER")]


class Info(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of an adapter folder written by PEFT or `cairn tune`; needs no base model."""

    adapter: Folder
    """a folder with adapter_config.json"""
    json: bool = False
    """print it as JSON"""


class Merge(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model with an adapter folded into its weights, in float32, rounded once to the type that the base has."""

    adapter: Folder
    """a folder with adapter_config.json"""
    base: str = ""
    """the model that it was made for; by default the one that the adapter names"""
    out: Path
    """a new folder, which transformers and `cairn serve` load"""
    json: bool = False
    """print what was lost by rounding as JSON"""


class Export(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The adapter of a run's newest checkpoint, as PEFT reads it."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """the folder of a run with an [adapter]"""
    out: Path | None = None
    """by default `adapter` in the folder of the run"""


def run(args: list[str]) -> int:
    about = "Low-rank adapters: look at them, merge them into their base, write them for PEFT."
    return dispatch("adapter", about, SUBVERBS, args)


def _info(args: list[str]) -> int:
    options = load(Info, args=args, env_prefix="CAIRN_ADAPTER_", prog="cairn adapter info").value
    from cairn.models.adapter.folder import read_tensors
    from cairn.models.adapter.peft_config import read_config

    spec, base = read_config(options.adapter)
    tensors = read_tensors(options.adapter)
    values = sum(tensor.numel() for tensor in tensors.values())
    maps = len({name.partition(".lora_")[0] for name in tensors})
    if options.json:
        found = {"spec": spec, "base": base, "maps": maps, "parameters": values}
        print(msgspec.json.encode(found).decode())
        return 0
    kind = "DoRA" if spec.dora else "rsLoRA" if spec.rslora else "LoRA"
    print(f"{kind} of rank {spec.rank}, alpha {spec.alpha:g}, on {maps} maps: {values:,} values")
    print(f"base     {base or 'not named'}")
    targets = spec.targets if isinstance(spec.targets, str) else ", ".join(spec.targets)
    print(f"targets  {targets}")
    for pattern, rank in spec.ranks.items():
        print(f"rank     {rank} for {pattern}")
    return 0


def _merge(args: list[str]) -> int:
    options = load(Merge, args=args, env_prefix="CAIRN_ADAPTER_", prog="cairn adapter merge").value
    from cairn.models.adapter.merge import merge_folder
    from cairn.models.adapter.peft_config import read_config
    from cairn.models.checkpoint import open_checkpoint
    from cairn.models.export import export
    from cairn.models.hub import resolve

    if not _is_free(options.out):
        raise ConfigError(f"{options.out} exists and is not empty", hint="choose another --out")
    base = options.base or read_config(options.adapter)[1]
    if not base:
        raise ConfigError(f"{options.adapter} names no base model", hint="name it with --base")
    opened = open_checkpoint(resolve(base))
    model = opened.load("cpu")
    report = merge_folder(model, options.adapter)
    export(model, options.out, like=opened.path if opened.path.is_dir() else None)
    if options.json:
        print(msgspec.json.encode(report._asdict()).decode())
        return 0
    print(
        f"{report.maps} maps merged; rounding changed a weight by at most {report.largest:.2g} and lost "
        f"{report.lost:.2%} of the update",
        file=sys.stderr,
    )
    print(f"{options.out}: serve it with cairn serve {options.out}")
    return 0


def _export(args: list[str]) -> int:
    options = load(
        Export, args=args, env_prefix="CAIRN_ADAPTER_", prog="cairn adapter export"
    ).value
    from cairn.models.adapter.folder import WEIGHTS
    from cairn.models.adapter.peft_config import FILE
    from cairn.train.checkpoint.export import export_adapter

    out = options.out or options.run / "adapter"
    if not _is_free(out, of=(FILE, WEIGHTS)):  # an older one of the run is replaced
        raise ConfigError(
            f"{out} exists and is not an adapter alone", hint="name a new folder with --out"
        )
    found = export_adapter(options.run, out)
    print(f"{found.name} written to {out}")
    return 0


def _is_free(out: Path, of: tuple[str, ...] = ()) -> bool:
    """Return whether a folder is new, or has nothing but the files named."""
    if not out.exists():
        return True
    return bool(out.name) and out.is_dir() and {entry.name for entry in out.iterdir()} <= set(of)


SUBVERBS = {
    "info": Subverb(_info, "rank, maps, base and size of an adapter"),
    "merge": Subverb(_merge, "a model with the adapter folded into its weights"),
    "export": Subverb(_export, "the adapter of a run, as PEFT reads it"),
}
