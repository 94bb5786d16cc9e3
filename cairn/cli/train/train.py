"""`cairn train`: from a recipe to a model that can be served. Shows how it goes; trains nothing itself."""

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import tyro

from cairn.core.config import load, to_toml
from cairn.core.errors import UsageError
from cairn.core.flags import asks_for, read_flags
from cairn.core.schema import leaves
from cairn.core.units import format_bytes, format_count, format_duration
from cairn.train.config import Train

if TYPE_CHECKING:
    from cairn.models.spec import ModelSpec
    from cairn.train.memory import Memory
    from cairn.train.metrics_log import Record
    from cairn.train.run import Finished

SHORT = {f"--{axis}": f"--parallel.{axis}" for axis in ("dp", "fsdp", "pp", "cp", "tp", "ep")}
SHORT |= {"--lr": "--optim.lr"}
PREFIX = "CAIRN_TRAIN_"
BARS = "▁▂▃▄▅▆▇█"
POINTS = 1000  # of the losses that --json prints


class TrainVerb(Train, frozen=True, forbid_unknown_fields=True, kw_only=True):
    __doc__ = Train.__doc__

    recipe: tyro.conf.Positional[str] = "tiny-cpu"
    """tiny-cpu, qwen3-0.6b-1xh200, qwen3-1.7b-1xh200, qwen3-8b-1xh200, llama3-8b-8xh100, or a TOML file"""
    print: bool = False
    """write the recipe as TOML and leave"""
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
    verb = read(args)
    config = train_part(verb)
    if verb.print:
        sys.stdout.write(to_toml(config))
        return 0
    if verb.plan:
        return _plan(config, verb.json)
    if verb.export_only:
        return _export(config, verb.json)
    if config.out is None:
        config = msgspec.structs.replace(
            config, out=free_folder(Path("runs"), Path(verb.recipe).stem)
        )
    finished = _train(config, verb)
    _tell(finished, verb)
    return 130 if finished.outcome.stopped_early else 0


def read(args: list[str]) -> TrainVerb:
    """Recipe < environment < flags. A name is a file too: the recipe as TOML."""
    args = [_long(arg) for arg in args]
    if asks_for(args, "--help", "-h"):
        load(TrainVerb, args=args, env_prefix=PREFIX)  # prints it and leaves
    named = _recipe_name(args)
    if named.endswith(".toml") or "/" in named or Path(named).is_file():
        return load(TrainVerb, args=args, env_prefix=PREFIX, file=Path(named)).value
    from cairn.train.recipes import recipe

    text = to_toml(recipe(named))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{named}.toml"
        file.write_text(text, encoding="utf-8")
        return load(TrainVerb, args=args, env_prefix=PREFIX, file=file).value


def _recipe_name(args: list[str]) -> str:
    """Before anything is checked: values that are wrong with the defaults may be right with the recipe."""
    plain = [arg for arg in args if arg != "--explain"]
    words = read_flags(leaves(TrainVerb), plain, "cairn train")
    given = words["recipe"].raw if "recipe" in words else os.environ.get(f"{PREFIX}RECIPE")
    return str(given) if given else "tiny-cpu"


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


def _train(config: Train, verb: TrainVerb) -> "Finished":
    from cairn.models.checkpoint import default_device
    from cairn.train.launch import (
        from_environment,
        join_group,
        reporting_lost_peers,
        run_local,
    )
    from cairn.train.prepare import spec_of
    from cairn.train.refuse import check_layout
    from cairn.train.run import run as run_training

    world = config.parallel.world()
    # To ask for a GPU must not wake the driver: the ranks are forked from this process.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    started, say = from_environment(), _say(verb)
    if started is not None and config.recovery.on and started[1] < world:  # the job has shrunk
        from cairn.train.recovery.fewer_ranks import for_ranks, wait_idle

        config = for_ranks(config, started[1])
        world = config.parallel.world()
        if started[0] >= world:
            wait_idle(config, started[0], print)
            raise SystemExit(0)
        started = started[0], world
    check_layout(config, spec_of(config.model), started[1] if started else world)
    if started is not None and config.recovery.on:
        return _train_launched(config, started[0], say)
    if started is not None and world > 1:
        again = "run it again with the same --out: it goes on from the newest complete checkpoint"
        with reporting_lost_peers(started[0], again), _bar(config.steps) as told:
            join_group(*started, "env://", config.device)
            return run_training(config, started[0], say, told)
    say(f"folder {config.folder}; after an interruption go on with --out {config.folder}")
    if config.recovery.on:
        return _train_on_nodes(config, say)
    if world == 1:
        with _bar(config.steps) as told:
            return run_training(config, 0, say, told)

    def one_rank(rank: int, world: int) -> "Finished":
        with _bar(config.steps if rank == 0 else 0) as told:
            return run_training(config, rank, say, told)

    device = default_device() if config.device == "auto" else config.device
    return run_local(world, one_rank, device)


def _train_launched(config: Train, rank: int, say: Callable[[str], None]) -> "Finished":
    """Ranks that a launcher started one by one: their state comes from the memory of the nodes that are left."""
    from cairn.train.recovery.launched import run_launched

    with _bar(config.steps if rank == 0 else 0) as told:
        return run_launched(config, rank, config.device, say, told)


def _train_on_nodes(config: Train, say: Callable[[str], None]) -> "Finished":
    """Ranks that are started again when one of them dies (`[recovery]` of the recipe)."""
    from cairn.models.checkpoint import default_device
    from cairn.train.recovery.local_driver import run_on_nodes

    device = default_device() if config.device == "auto" else config.device
    with _bar(config.steps) as told:
        return run_on_nodes(config, device, say, told)


def _plan(config: Train, as_json: bool) -> int:
    from cairn.train.fused_forward import obstacle
    from cairn.train.prepare import spec_of
    from cairn.train.refuse import check_layout

    spec = spec_of(config.model)
    check_layout(config, spec, config.parallel.world())
    fused = config.precision.kernels == "fused" or (
        config.precision.kernels == "auto" and config.device != "cpu" and obstacle(spec) is None
    )
    memory, whose = _memory(spec, config, fused)
    sizes = {**memory.table(), "together": memory.total()}
    if as_json:
        about = {
            "family": spec.family,
            "parameters": spec.parameters(),
            "fused": fused,
            "of": whose,
        }
        print(msgspec.json.encode({**about, "bytes": sizes}).decode())
        return 0
    form = "fused form, which is for GPUs" if fused else "plain form"
    print(f"{spec.family}, {format_count(spec.parameters())} parameters, {form}; {whose}:")
    for name, size in sizes.items():
        print(f"  {name:<12} {format_bytes(size):>12}")
    return 0


def _memory(spec: "ModelSpec", config: Train, fused: bool) -> "tuple[Memory, str]":
    """What is predicted, and of whom: a rank's part is known where the planner knows the form."""
    from cairn.train.memory import predict

    layout, precision, spread = config.parallel, config.precision, config.spread
    if layout.world() == 1:
        return predict(spec, config, fused), "one process"
    if not fused or precision.kind != "bfloat16" or spread.zero or config.optim.offload:
        return predict(spec, config, fused), f"one process, which {layout.words()} would divide"
    from cairn.plan.train_cost import Choice, Job
    from cairn.plan.train_memory import rank_memory

    job = Job(spec=spec, sequence=config.data.sequence, sequences=config.data.sequences,
              states=config.optim.states)  # fmt: skip
    recompute = "selective" if precision.recompute == "auto" else precision.recompute
    choice = Choice(layout=layout, microbatch=config.data.microbatch, recompute=recompute,
                    order=spread.order, chunks=spread.chunks,
                    sequence_parallel=spread.sequence_parallel,
                    whole_gradients=spread.whole_gradients)  # fmt: skip
    return rank_memory(job, choice), f"each of {layout.world()} ranks ({layout.words()})"


def _export(config: Train, as_json: bool) -> int:
    from cairn.train.checkpoint.export import export_newest

    if config.out is None:
        raise UsageError("--export-only is given without --out", hint="name the folder of the run")
    tokenizer = config.out / "tokenizer"
    target = config.out / "model"
    found = export_newest(config.out, target, tokenizer if tokenizer.exists() else None)
    if as_json:
        told = {"checkpoint": str(found), "model": str(target), "serve": f"cairn serve {target}"}
        print(msgspec.json.encode(told).decode())
        return 0
    print(f"{found.name} written to {target}; serve it: cairn serve {target}")
    return 0


def _say(verb: TrainVerb) -> Callable[[str], None]:
    def say(text: str) -> None:
        # Looked up anew: a progress bar puts something else there.
        print(text, file=sys.stderr if verb.json else sys.stdout, flush=True)

    return say


def _tell(finished: "Finished", verb: TrainVerb) -> None:
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
    if outcome.stopped_early:
        print(f"stopped after step {outcome.step}; go on with --out {finished.folder}")
    if serve:
        print(f"serve it: {serve}")


def _document(finished: "Finished", verb: TrainVerb, serve: str | None) -> dict[str, Any]:
    from cairn.report.plot import thin
    from cairn.train.metrics_log import read_log

    records = read_log(Path(finished.folder))
    losses = [(record.step, record.loss) for record in records if record.loss is not None]
    speeds = sorted(record.tokens_per_s for record in records)
    return {
        "recipe": verb.recipe, **msgspec.to_builtins(finished.outcome), "serve": serve,
        "folder": finished.folder, "model": finished.model, "report": finished.report,
        "tokens_per_s": speeds[len(speeds) // 2] if speeds else None,
        "losses": list(thin(losses, POINTS)),
    }  # fmt: skip


@contextmanager
def _bar(steps: int) -> "Iterator[Callable[[Record], None]]":
    """A bar with the time left, the loss and its curve, on a terminal; elsewhere a line now and then."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal or not steps:
        yield _lines(steps) if steps else lambda record: None
        return
    columns = (
        TextColumn("training"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )  # fmt: skip
    losses: list[float] = []
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=steps)

        def told(record: "Record") -> None:
            losses.append(record.loss if record.loss is not None else math.nan)
            speed = format_count(record.tokens_per_s)
            share = f", MFU {record.mfu:.0%}" if record.mfu is not None else ""
            words = f"loss {losses[-1]:.3f} {curve(losses)} {speed} tokens/s{share}"
            bars.update(task, completed=record.step, description=words)

        yield told


def _lines(steps: int) -> "Callable[[Record], None]":
    """Ten lines on stderr, for a log."""
    every = max(1, steps // 10)

    def told(record: "Record") -> None:
        if record.step % every == 0 or record.step in (1, steps):
            loss = "not finite" if record.loss is None else f"{record.loss:.4f}"
            speed = format_count(record.tokens_per_s)
            seconds = max(1, round(record.seconds * (steps - record.step)))
            left = f", {format_duration(seconds)} left" if record.step < steps else ""
            print(f"step {record.step}/{steps} loss {loss} {speed} tokens/s{left}", file=sys.stderr)

    return told


def curve(losses: list[float], width: int = 16) -> str:
    """The losses so far as a line of bars, the newest at the right."""
    step = max(1, len(losses) // width)
    shown = [loss for loss in losses[::-1][::step][:width][::-1] if math.isfinite(loss)]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0
    return "".join(BARS[round((loss - low) * scale)] for loss in shown)
