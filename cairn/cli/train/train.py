"""`cairn train`: from a recipe to a model that can be served. Shows how it goes; trains nothing itself."""

import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import tyro

from cairn.cli.train.display import Display
from cairn.core.config import load, to_toml, variable_name
from cairn.core.errors import UsageError
from cairn.core.flags import asks_for, read_flags
from cairn.core.schema import leaves, plain_value
from cairn.core.units import format_duration
from cairn.train.config import Train

if TYPE_CHECKING:
    from cairn.train.run import Finished

SHORT = {f"--{axis}": f"--parallel.{axis}" for axis in ("dp", "fsdp", "pp", "cp", "tp", "ep")}
SHORT |= {"--lr": "--optim.lr"}
PREFIX = "CAIRN_TRAIN_"
RECIPE = "recipe.toml"  # of a run, in its folder
# Recipes.
DEFAULTS = {"cairn train": "tiny-cpu", "cairn tune": "tiny-lora", "cairn align": "tiny-sort"}
POINTS = 1000  # of the losses that --json prints


class TrainVerb(Train, frozen=True, forbid_unknown_fields=True, kw_only=True):
    __doc__ = Train.__doc__

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[RECIPE]")] = "tiny-cpu"
    """tiny-cpu, qwen3-0.6b-1xh200, qwen3-1.7b-1xh200, qwen3-8b-1xh200, llama3-8b-8xh100, or a TOML file; without it
    that of the run in --out, else tiny-cpu"""
    print: bool = False
    """write the recipe as TOML, or with --json as JSON, and leave"""
    plan: bool = False
    """say what the run would need in memory, and leave"""
    export_only: bool = False
    """write the newest checkpoint of --out as safetensors, and leave"""
    json: bool = False
    """print the outcome as JSON; lines go to stderr"""


def run(args: list[str]) -> int:
    if args[:1] == ["schedule"]:
        from cairn.cli.train.pipeline import run as draw

        return draw(args[1:])
    if any(arg.partition("=")[0] == "--lora" for arg in args):
        raise UsageError(
            "cairn train has no flag --lora",
            hint="`cairn tune` has it, for a model that exists; here it is --adapter.rank RANK",
        )
    return carry_out(read(args))


def carry_out(verb: TrainVerb) -> int:
    """Train as the flags say, or print what they ask for."""
    config = train_part(verb)
    if verb.print:
        sys.stdout.write(_as_json(config) if verb.json else to_toml(config))
        return 0
    if verb.plan:
        from cairn.cli.train.memory_plan import show_plan

        return show_plan(config, verb.json)
    if verb.export_only:
        return _export(config, verb.json)
    if config.out is None:
        config = msgspec.structs.replace(
            config, out=free_folder(Path("runs"), Path(verb.recipe).stem)
        )
    display = Display(config.steps, config.log.every, verb.json)
    try:
        finished = _train(config, display)
    finally:
        display.close()
    _print_outcome(finished, verb, config)
    return 130 if finished.outcome.stopped_early else 0


def read(
    args: list[str], kind: type[TrainVerb] = TrainVerb, prog: str = "cairn train"
) -> TrainVerb:
    """Recipe < environment < flags. A name is a file too: the recipe as TOML."""
    args = [_long(arg) for arg in args]
    if asks_for(args, "--help", "-h"):
        _print_help(kind, prog)
    from cairn.train.recipes import is_data, recipe

    given = early_settings(args, kind, prog, PREFIX)
    named = recipe_name(given["recipe"], given["out"], prog)
    if named.endswith(".toml") or (Path(named).is_file() and not is_data(named)):
        verb = load(kind, args=args, env_prefix=PREFIX, file=Path(named), prog=prog).value
        return msgspec.structs.replace(verb, recipe=named)
    fitting = _fitting(recipe(named), given["objective.kind"])
    with as_file(fitting, named) as file:
        verb = load(kind, args=args, env_prefix=PREFIX, file=file, prog=prog).value
        return msgspec.structs.replace(verb, recipe=named)


@contextmanager
def as_file(config: Train, name: str) -> Iterator[Path]:
    """A recipe as a TOML file, for as long as it is read: messages then name it like any other."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        yield file


def _print_help(kind: type[TrainVerb], prog: str) -> NoReturn:
    """Print the help with the values of the default recipe, which run without any flag."""
    from cairn.train.recipes import recipe

    with as_file(recipe(DEFAULTS[prog]), DEFAULTS[prog]) as file:
        load(kind, args=["--help"], env_prefix=PREFIX, env={}, file=file, prog=prog)
    raise SystemExit(0)  # `load` has left already


def early_settings(args: list[str], kind: type[Train], prog: str, prefix: str) -> dict[str, str]:
    """Settings given by flags and environment, before anything is checked: values that are wrong with the
    defaults may be right with the recipe."""
    words = read_flags(leaves(kind), [arg for arg in args if arg != "--explain"], prog)
    for key, what in (("recipe", "RECIPE"), ("out", "--out")):
        if key in words and not words[key].raw:
            raise UsageError(f"{what} is empty", hint="name one, or leave it out")
    return {
        key: str(words[key].raw) if key in words else os.environ.get(variable_name(key, prefix), "")
        for key in ("recipe", "out", "objective.kind")
    }


def recipe_name(named: str, out: str, prog: str) -> str:
    """The recipe that is named, else that of the run in --out, else the default."""
    if named:
        if (Path(named) / RECIPE).is_file():
            again = f"{prog} --out {shlex.quote(named)}"
            raise UsageError(f"{named} is the folder of a run", hint=f"go on with it: {again}")
        return named
    kept = Path(out or ".") / RECIPE
    return str(kept) if out and kept.is_file() else DEFAULTS[prog]


def _fitting(named: Train, objective: str) -> Train:
    """A named recipe keeps text apart to measure with, which preferences have no use for."""
    if objective in ("", "sft"):
        return named
    without = msgspec.structs.replace(named.validation, share=0.0, sources=[])
    return msgspec.structs.replace(named, validation=without)


def _as_json(config: Train) -> str:
    return msgspec.json.format(msgspec.json.encode(plain_value(config))).decode() + "\n"


def train_part(verb: TrainVerb) -> Train:
    return Train(**{name: getattr(verb, name) for name in Train.__struct_fields__})


def free_folder(root: Path, name: str) -> Path:
    """runs/NAME, or with a number where that is taken."""
    number = 1
    while (folder := root / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return folder


def _long(arg: str) -> str:
    name, equals, value = arg.partition("=")
    return SHORT.get(name, name) + equals + value


def _train(config: Train, display: Display) -> "Finished":
    from cairn.train.launch import from_environment

    # To ask for a GPU must not wake the driver: the ranks are forked from this process.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    started = from_environment()
    if started is None:
        return _train_here(config, display)
    return _train_rank(config, *started, display)


def _train_here(config: Train, display: Display) -> "Finished":
    """All ranks of the layout are started by this process, or it is the only one."""
    from cairn.models.checkpoint import default_device
    from cairn.train.describe import spec_of
    from cairn.train.launch import run_local
    from cairn.train.run import run as run_training
    from cairn.train.run_checks import check_layout

    world = config.parallel.world()
    if world > 1:  # before ranks are started; each checks for itself in `prepare`
        check_layout(config, spec_of(config.model), world)
    if config.recovery.on:
        return _train_on_nodes(config, display)
    if world == 1:
        return run_training(config, 0, display.log_line, display.on_record)

    def one_rank(rank: int, world: int) -> "Finished":
        return run_training(config, rank, display.log_line, display.on_record)

    device = default_device() if config.device == "auto" else config.device
    return run_local(world, one_rank, device)


def _train_rank(config: Train, rank: int, ranks: int, display: Display) -> "Finished":
    """Run one of the ranks that a launcher has started."""
    from cairn.train.launch import join_group, reporting_lost_peers
    from cairn.train.parallel.layout import check
    from cairn.train.run import run as run_training

    if config.recovery.on and ranks < config.parallel.world():  # the job has shrunk
        from cairn.train.recovery.fewer_ranks import for_ranks, wait_idle

        config = for_ranks(config, ranks)
        ranks = config.parallel.world()
        if rank >= ranks:
            wait_idle(config, rank, print)
            raise SystemExit(0)
    check(config.parallel, ranks)  # else each of several ranks would train all of a layout of one
    if config.recovery.on:
        return _train_launched(config, rank, display)
    if ranks == 1:
        return _train_here(config, display)
    again = f"go on from the newest complete checkpoint: {config.resume_command}"
    with reporting_lost_peers(rank, again):
        join_group(rank, ranks, "env://", config.device)
        return run_training(config, rank, display.log_line, display.on_record)


def _train_launched(config: Train, rank: int, display: Display) -> "Finished":
    """Ranks that a launcher started one by one: their state comes from the memory of the nodes that are left."""
    from cairn.train.recovery.launched import run_launched

    return run_launched(config, rank, config.device, display.log_line, display.on_record)


def _train_on_nodes(config: Train, display: Display) -> "Finished":
    """Ranks that are started again when one of them dies (`[recovery]` of the recipe)."""
    from cairn.models.checkpoint import default_device
    from cairn.train.recovery.local_driver import run_on_nodes

    device = default_device() if config.device == "auto" else config.device
    return run_on_nodes(config, device, display.log_line, display.on_record)


def _export(config: Train, as_json: bool) -> int:
    from cairn.train.checkpoint.export import export_newest

    if config.out is None:
        raise UsageError("--export-only is given without --out", hint="name the folder of the run")
    tokenizer = config.out / "tokenizer"
    target = config.out / "model"
    found = export_newest(config.out, target, tokenizer if tokenizer.exists() else None)
    if as_json:
        on_record = {
            "checkpoint": str(found),
            "model": str(target),
            "serve": f"cairn serve {target}",
        }
        print(msgspec.json.encode(on_record).decode())
        return 0
    print(f"{found.name} written to {target}; serve it: cairn serve {target}")
    return 0


def _print_outcome(finished: "Finished", verb: TrainVerb, config: Train) -> None:
    if finished.report is None:
        return  # rank 0 speaks for all that a launcher started
    outcome = finished.outcome
    serve = f"cairn serve {finished.model}" if finished.model else None
    if verb.json:
        print(msgspec.json.format(msgspec.json.encode(_document(finished, verb, serve))).decode())
        return
    if outcome.first_loss is None or outcome.last_loss is None:
        print(f"nothing left to do: {finished.folder} is at step {outcome.step}")
    else:
        took = format_duration(outcome.seconds)
        print(
            f"loss {outcome.first_loss:.3f} -> {outcome.last_loss:.3f} in {took}; report: {finished.report}"
        )
    if outcome.held_out is not None and outcome.held_out.loss is not None:
        size = outcome.held_out.bits_per_byte
        per_byte = "" if size is None else f", {size:.3f} bits per byte"
        print(f"held-out loss {outcome.held_out.loss:.3f}{per_byte}")
    if outcome.stopped_early:
        print(f"stopped after step {outcome.step}; go on with: {config.resume_command}")
    if serve:
        print(f"serve it: {serve}")


def _document(finished: "Finished", verb: TrainVerb, serve: str | None) -> dict[str, Any]:
    from cairn.report.plot import thin
    from cairn.train.metrics_log import read_log

    records = read_log(Path(finished.folder))
    losses = [(record.step, record.loss) for record in records if record.loss is not None]
    speeds = sorted(record.tokens_per_s for record in records)
    return {
        "recipe": verb.recipe,
        **msgspec.to_builtins(finished.outcome),
        "serve": serve,
        "folder": finished.folder,
        "model": finished.model,
        "report": finished.report,
        "tokens_per_s": speeds[len(speeds) // 2] if speeds else None,
        "losses": list(thin(losses, POINTS)),
    }
