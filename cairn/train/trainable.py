"""Trained and frozen weights of a run, and the source of the frozen ones.

    model.frozen = ["embedding.*", "layers.0.*"]    ->    Trainable(name) -> bool

One predicate over the names of a checkpoint, which no layout changes. `freeze` carries it over to parameters; from then
on all code looks at `requires_grad`: frozen weights get no gradient, no bucket, no optimizer state, and a checkpoint
does not repeat them but refers to the weights that the run began with (`Base`).
"""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch import nn

from cairn.core.errors import ConfigError, DataError
from cairn.models.adapter.attach import ADAPTED, attach
from cairn.models.adapter.lora import adapter_parameters
from cairn.models.adapter.spec import ALL_LINEAR, AdapterSpec
from cairn.models.build import ModelBuild, Slot
from cairn.models.checkpoint import Checkpoint
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Transformer
from cairn.train.config import Train

BLOCK = 16 << 20  # bytes that are hashed at a time


class Trainable(msgspec.Struct, frozen=True):
    """Selects the trained tensors of a checkpoint by shell patterns (* and ?)."""

    frozen: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # if there are some, all other tensors are frozen

    def __call__(self, name: str) -> bool:
        if self.only and not any(fnmatchcase(name, pattern) for pattern in self.only):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.frozen)


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """The weights that a run with frozen parts began with: a checkpoint refers to them."""

    path: str = ""  # as the recipe names it; empty: random weights of `seed`
    digest: str = ""  # of the files under `path`
    seed: int = 0
    frozen: tuple[str, ...] = ()
    adapter: AdapterSpec | None = None  # what was trained in place of the weights
    nf4: bool = False  # the weights under it were in 4 bits


EVERYTHING = Trainable()


def freeze(module: nn.Module, slots: Iterable[Slot], trainable: Trainable) -> None:
    """Parameters whose tensors are frozen no longer ask for a gradient."""
    by_parameter: dict[str, list[str]] = {}
    for slot in slots:
        by_parameter.setdefault(slot.parameter, []).append(slot.name)
    for path, names in by_parameter.items():
        trained = [name for name in names if trainable(name)]
        if not trained:
            module.get_parameter(path).requires_grad_(False)
        elif len(trained) < len(names):
            still = sorted(set(names) - set(trained))
            raise ConfigError(
                f"model.frozen names {still[0]}, which is stored in one matrix with {trained[0]}, and that is trained",
                hint="freeze both or neither; q, k and v, gate and up, and all experts of a layer go together",
            )


def frozen_parameters(spec: ModelSpec, trainable: Trainable) -> int:
    """Number of frozen values. Raises ConfigError if a pattern matches no tensor or nothing is left to train."""
    if not trainable.frozen:
        return 0
    slots = list(Transformer(spec).slots())
    for pattern in trainable.frozen:
        if not any(fnmatchcase(slot.name, pattern) for slot in slots):
            raise ConfigError(
                f"model.frozen {pattern!r} fits no weight of this {spec.family} model",
                hint=f"names are those of {slots[0].name}, {slots[-1].name}, ...",
            )
    sizes = {slot.name: _size(slot) for slot in slots}
    frozen = sum(size for name, size in sizes.items() if not trainable(name))
    if frozen == sum(sizes.values()):
        raise ConfigError("model.frozen leaves nothing to train", hint="leave a pattern out")
    return frozen


def _size(slot: Slot) -> int:
    count = 1
    for side in slot.shape:
        count *= side
    return count


def adapter_of(config: Train) -> AdapterSpec | None:
    """The adapter that a recipe asks for."""
    settings = config.adapter
    if not settings.rank:
        return None
    targets = settings.targets[0] if settings.targets == [ALL_LINEAR] else tuple(settings.targets)
    return AdapterSpec(
        rank=settings.rank,
        alpha=settings.alpha,
        targets=targets,
        rslora=settings.rslora,
        dora=settings.dora,
    )


def trainable_of(config: Train) -> Trainable:
    """Trained tensors of a run: those of its adapter, or all that are not frozen."""
    if config.adapter.rank:
        return Trainable(only=(ADAPTED,))
    return Trainable(tuple(config.model.frozen))


def frozen_values(config: Train, spec: ModelSpec) -> int:
    """Values of the model that have no gradient; with an adapter, all but as many as the adapter has."""
    adapter = adapter_of(config)
    if adapter is None:
        return frozen_parameters(spec, trainable_of(config))
    blank = Transformer(spec)
    attach(blank, spec, adapter, ModelBuild())
    return spec.parameters() - sum(one.numel() for one in adapter_parameters(blank))


def base_of(config: Train, start: Checkpoint | None) -> Base | None:
    """Where frozen weights come from; rank 0, which writes it down, looks at the files."""
    frozen = tuple(config.model.frozen)
    adapter = adapter_of(config)
    if not frozen and adapter is None:
        return None
    nf4 = adapter is not None and config.adapter.base == "nf4"
    if start is None:
        return Base(seed=config.seed, frozen=frozen, adapter=adapter, nf4=nf4)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    digest = digest_of(start.path) if is_first else ""
    path = str(config.model.checkpoint)
    return Base(path=path, digest=digest, frozen=frozen, adapter=adapter, nf4=nf4)


def digest_of(path: Path) -> str:
    """Of the weight files under a path: names, sizes and all bytes."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(_digest, files))
    together = hashlib.blake2b(digest_size=16)
    for file, part in zip(files, parts, strict=True):
        together.update(f"{file.name}:{part}\n".encode())
    return together.hexdigest()


def _digest(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as source:
        while block := source.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def check_base(there: Base | None, here: Base | None, folder: Path) -> None:
    """Refuses to go on with other frozen weights than those that the checkpoint was trained beside."""
    if there is None or here is None or there.path == here.path == "" or not here.digest:
        return
    if there.digest != here.digest:
        raise DataError(
            f"the frozen weights in {here.path} are not those that {folder} was trained with: their digest is "
            f"{here.digest}, not {there.digest}",
            hint="put the files of the base model back, or name another folder with --out",
        )
