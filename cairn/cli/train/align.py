"""`cairn align`: reinforcement learning on tasks that a program can check. Shows how it goes; trains nothing itself."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from cairn.align.config import Align
from cairn.cli.train.display import Display
from cairn.cli.train.train import free_folder
from cairn.cli.train.tune import with_adapter
from cairn.core.config import load, to_toml
from cairn.core.flags import asks_for, read_flags
from cairn.core.schema import leaves
from cairn.core.units import format_duration

PREFIX = "CAIRN_ALIGN_"
DEFAULT = "tiny-sort"


class AlignVerb(Align, frozen=True, forbid_unknown_fields=True, kw_only=True):
    __doc__ = Align.__doc__

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[RECIPE]")] = DEFAULT
    """tiny-sort, tiny-ppo (a minute each on a CPU), tiny-tool (two), or a TOML file"""
    print: bool = False
    """write the recipe as TOML and leave"""
    json: bool = False
    """print the outcome as JSON; lines go to stderr"""


def run(args: list[str]) -> int:
    verb = _read(with_adapter(args))
    config = Align(**{name: getattr(verb, name) for name in Align.__struct_fields__})
    if verb.print:
        sys.stdout.write(to_toml(config))
        return 0
    if config.out is None:
        out = free_folder(Path("runs"), Path(verb.recipe).stem)
        config = msgspec.structs.replace(config, out=out)
    from cairn.align.run import align

    display = Display(config.steps, config.log.every, verb.json)
    try:
        aligned = align(config, display.log_line, display.on_record)
    finally:
        display.close()
    if verb.json:
        print(msgspec.json.encode(aligned).decode())
    else:
        before = "" if aligned.first is None else f"{aligned.first:.3f} -> "
        took = format_duration(aligned.finished.outcome.seconds)
        print(f"held-out reward {before}{aligned.last:.3f} in {took}; report: {aligned.page}")
        if aligned.finished.model:
            print(f"serve it: cairn serve {aligned.finished.model}")
    return 130 if aligned.finished.outcome.stopped_early else 0


def _read(args: list[str]) -> AlignVerb:
    """Recipe < environment < flags."""
    if asks_for(args, "--help", "-h"):
        load(AlignVerb, args=args, env_prefix=PREFIX)  # prints it and leaves
    plain = [arg for arg in args if arg != "--explain"]
    words = read_flags(leaves(AlignVerb), plain, "cairn align")
    named = str(words["recipe"].raw) if "recipe" in words else DEFAULT
    from cairn.align.recipes import recipe
    from cairn.train.recipes import is_data

    if named.endswith(".toml") or (Path(named).is_file() and not is_data(named)):
        verb = load(AlignVerb, args=args, env_prefix=PREFIX, file=Path(named)).value
        return msgspec.structs.replace(verb, recipe=named)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{named}.toml"
        file.write_text(to_toml(recipe(named)), encoding="utf-8")
        return load(AlignVerb, args=args, env_prefix=PREFIX, file=file).value
