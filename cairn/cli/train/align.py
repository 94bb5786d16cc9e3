"""`cairn align`: reinforcement learning on tasks that a program can check. Shows how it goes; trains nothing itself."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro

from cairn.align.config import Align
from cairn.cli.train.display import Display
from cairn.cli.train.train import (
    DEFAULTS,
    as_file,
    early_settings,
    free_folder,
    recipe_name,
)
from cairn.cli.train.tune import with_adapter
from cairn.core.config import load, to_toml
from cairn.core.flags import asks_for
from cairn.core.units import format_duration

if TYPE_CHECKING:
    from cairn.align.run import Aligned

PREFIX = "CAIRN_ALIGN_"
PROG = Align.verb
DEFAULT = DEFAULTS[PROG]


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
        _print_outcome(aligned, config)
    return 130 if aligned.finished.outcome.stopped_early else 0


def _print_outcome(aligned: "Aligned", config: Align) -> None:
    finished, outcome = aligned.finished, aligned.finished.outcome
    if outcome.stopped_early:
        print(f"stopped after step {outcome.step}; go on with: {config.resume_command}")
    elif outcome.resumed == outcome.step:
        print(f"nothing left to do: {finished.folder} has finished, at step {outcome.step}")
    else:
        print(f"finished after step {outcome.step}, in {format_duration(outcome.seconds)}")
    before = "" if aligned.first is None else f"{aligned.first:.3f} -> "
    print(f"held-out reward {before}{aligned.last:.3f}; report: {aligned.page}")
    if finished.model:
        print(f"the model is in {finished.model}; serve it: cairn serve {finished.model}")


def _read(args: list[str]) -> AlignVerb:
    """Recipe < environment < flags."""
    from cairn.align.recipes import recipe
    from cairn.train.recipes import is_data

    if asks_for(args, "--help", "-h"):  # prints it, with what runs without any flag, and leaves
        with as_file(recipe(DEFAULT), DEFAULT) as file:
            load(AlignVerb, args=["--help"], env_prefix=PREFIX, env={}, file=file, prog=PROG)
    given = early_settings(args, AlignVerb, PROG, PREFIX)
    named = recipe_name(given["recipe"], given["out"], PROG)
    if named.endswith(".toml") or (Path(named).is_file() and not is_data(named)):
        verb = load(AlignVerb, args=args, env_prefix=PREFIX, file=Path(named), prog=PROG).value
        return msgspec.structs.replace(verb, recipe=named)
    with as_file(recipe(named), named) as file:
        return load(AlignVerb, args=args, env_prefix=PREFIX, file=file, prog=PROG).value
