"""Refuses runs that cannot work, before weights are made: each check names the values and what to change.

    folder -> layout -> experts' balance -> the run that is there already -> room on the disk -> memory

`prepare` asks them in that order, which is the order of their cost. Reads headers and sizes; loads nothing.
"""

import os
import shutil
from pathlib import Path

from cairn.core.errors import ConfigError, DataError
from cairn.core.units import format_bytes
from cairn.models.spec import ModelSpec
from cairn.models.weights_fit import free_bytes
from cairn.train.checkpoint.folder import complete_steps, folder_of
from cairn.train.checkpoint.load import check_model, read_about
from cairn.train.config import Train
from cairn.train.memory import checkpoint_bytes, predict
from cairn.train.parallel.layout import StepDemand, check

# Of a run, in its folder.
CHECKPOINTS, RECIPE, TOKENIZER = "checkpoints", "recipe.toml", "tokenizer"
MODEL, ADAPTER = "model", "adapter"
# What a checkpoint holds depends on these.
KEPT_AS = (
    ("optim", "kind"),
    ("optim", "states"),
    ("precision", "kind"),
    ("precision", "masters"),
    ("model", "frozen"),
)


def check_layout(config: Train, spec: ModelSpec, world: int) -> None:
    work = StepDemand(
        tokens=config.data.sequence * config.data.microbatch,
        microbatches=config.microbatches,
        strategy=config.strategy,
        # Muon's own states are float32; what it leaves to AdamW is cut by rows alone.
        int8_states=config.optim.states == "int8" and config.optim.kind == "adamw",
    )
    check(config.parallel, world, spec, work)


def is_balanced(config: Train) -> bool:
    """Return whether routers must count tokens, which `parallel.balance` does for any number of ranks."""
    return bool(config.balance.loss or config.balance.bias)


def check_balance(config: Train, spec: ModelSpec) -> None:
    """Refuse a balance of experts that nothing would keep."""
    if not is_balanced(config) or spec.experts is not None:
        return
    balance = config.balance
    raise ConfigError(
        f"balance.loss {balance.loss:g} and balance.bias {balance.bias:g} for a {spec.family} "
        "model without experts",
        hint="use 0 for both",
    )


def check_folder(config: Train) -> None:
    """Check that the run's folder can be created and written."""
    existing = _existing(config)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "is a folder without permission to write" if existing.is_dir() else "is a file"
        raise ConfigError(
            f"the run cannot be written to {config.folder}: {existing} {what}",
            hint="name another folder with --out",
        )
    _check_replaced(config)


def _check_replaced(config: Train) -> None:
    """A run replaces what an earlier one has left in its folder; what is not of a run would be lost."""
    folder = config.folder
    if not any((folder / name).exists() for name in (RECIPE, CHECKPOINTS)):
        for path in (folder / MODEL, folder / ADAPTER, folder / TOKENIZER):
            if path.exists():
                raise ConfigError(
                    f"{path} would be replaced, and {folder} is no run: it has neither {RECIPE} nor {CHECKPOINTS}",
                    hint="name another folder with --out",
                )
    written = ((folder / MODEL).resolve(), (folder / ADAPTER).resolve())
    for key, value in (
        ("model.checkpoint", config.model.checkpoint),
        ("distill.teacher", config.distill.teacher),
    ):
        if value and Path(value).resolve() in written:
            raise ConfigError(
                f"{key} is {value}, which the run would replace at its end",
                hint="name another folder with --out",
            )


def _existing(config: Train) -> Path:
    """The folder of the run, or as much of its path as is there."""
    whole = config.folder.absolute()
    return next(path for path in (whole, *whole.parents) if os.path.lexists(path))


def check_goes_on(config: Train, spec: ModelSpec) -> None:
    """Check that the newest checkpoint of a resumed run fits this model and optimizer; reads two files."""
    root = config.folder / CHECKPOINTS
    saved = complete_steps(root)
    if not saved:
        return
    folder = folder_of(root, saved[-1])
    try:
        about = read_about(folder)
    except DataError:
        return  # damaged: the loop passes over it, and says so
    check_model(about, spec, folder)
    differing = [
        f"{table}.{key} is {there!r} there and {here!r} here"
        for table, key in KEPT_AS
        if (there := about.config.get(table, {}).get(key)) is not None
        and there != (here := getattr(getattr(config, table), key))
    ]
    if differing:
        raise ConfigError(
            f"{folder} was written with other states: {'; '.join(differing)}",
            hint="name another folder with --out; to begin with its weights alone, export them and name them "
            "with --model.checkpoint",
        )


def check_room(config: Train, spec: ModelSpec, frozen: int = 0) -> None:
    """Check before the first step that a checkpoint fits on the disk."""
    existing = _existing(config)
    free, needed = shutil.disk_usage(existing).free, checkpoint_bytes(spec, config, frozen)
    if free < needed:
        raise ConfigError(
            f"{format_bytes(free)} are free under {existing}, a checkpoint needs {format_bytes(needed)}",
            hint="make room, or name another folder with --out",
        )


def check_memory(config: Train, spec: ModelSpec, device: str, frozen: int = 0) -> None:
    """Check before allocation that the state between steps fits into memory. Single-process runs only."""
    free = free_bytes(device)
    if config.parallel.world() > 1 or free is None:
        return
    memory = predict(spec, config, fused=True, frozen=frozen)
    needed = memory.weights + memory.states + memory.masters
    if needed > free:
        raise ConfigError(
            f"weights {format_bytes(memory.weights)} + states {format_bytes(memory.states)} + masters "
            f"{format_bytes(memory.masters)} = {format_bytes(needed)}, and {format_bytes(free)} are free on {device}",
            hint="use 16 bits (precision.kind), optim.states int8, more ranks (--fsdp), or a smaller model",
        )
