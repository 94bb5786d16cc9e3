"""Puts an adapter onto a model, a stage of one, or takes it out of the sum for a while.

    attach(model, spec)         every map that the spec covers gets an addend, with blank parameters
    addends(model, spec)        the same addends, which are not added yet: an engine chooses among several of them
    with adapter_off(model):    the base model: what a reference says in preference training

The maps find their names in a checkpoint by `checkpoint_names`, so that patterns mean what they mean to PEFT.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

from torch import nn

from cairn.core.errors import ConfigError, UnsupportedModel
from cairn.models.adapter.lora import EmbeddingLoRA, LoRA, LoRAPart, adapters
from cairn.models.adapter.spec import AdapterSpec, check_targets
from cairn.models.build import ModelBuild
from cairn.models.checkpoint_names import TensorLocation, source
from cairn.models.linear.maps import ColumnParallelLinear, Linear, RowParallelLinear, Vocabulary
from cairn.models.spec import ModelSpec

ADAPTED = "*.adapter.*"  # the names of an adapter's tensors in our checkpoints
EMBEDDING = "embedding"


Shape = tuple[tuple[int, int], tuple[LoRAPart, ...]]  # of a map and its adapter


class Addend(NamedTuple):
    home: Linear
    lora: LoRA | EmbeddingLoRA


def attach(
    model: nn.Module,
    spec: ModelSpec,
    adapter: AdapterSpec,
    build: ModelBuild,
    names: Sequence[str] | None = None,
) -> list[LoRA | EmbeddingLoRA]:
    """Adapters on all maps that `adapter` covers, with blank parameters. `names`: all maps, where `model` is a part."""
    adapted = addends(model, spec, adapter, build, names)
    install(adapted.values())
    return [one.lora for one in adapted.values()]


def addends(
    model: nn.Module,
    spec: ModelSpec,
    adapter: AdapterSpec,
    build: ModelBuild,
    names: Sequence[str] | None = None,
    alike: bool = False,
) -> dict[str, Addend]:
    """Create adapters by the path of their linear map. `alike`: adapters of one shape share blank parameters."""
    check_targets(adapter, map_names(model, spec) if names is None else names)
    if adapter.dora and build.shards.size > 1:
        raise ConfigError(
            f"DoRA with tensor parallel {build.shards.size}: no rank has whole rows to measure",
            hint="use plain LoRA, or fsdp in place of tp",
        )
    adapted: dict[str, Addend] = {}
    blanks: dict[Shape, LoRA] | None = {} if alike else None
    for path, home in _maps(model):
        if (lora := _adapt(path, home, spec, adapter, build, blanks)) is not None:
            adapted[path] = Addend(home, lora)
    if not adapted and names is None:
        raise ConfigError("the adapter covers no map of this model", hint="widen its targets")
    return adapted


def install(adapted: Iterable[Addend]) -> None:
    """Each becomes a part of its map, and of every product from now on."""
    for home, lora in adapted:
        home.adapter = lora
        if isinstance(lora, EmbeddingLoRA):
            cast(Vocabulary, home).lookup_addend = lora.forward
        else:
            home.addend = lora.forward


def map_names(model: nn.Module, spec: ModelSpec) -> list[str]:
    """Checkpoint names of all linear maps."""
    return [_name(spec, path, part) for path, home in _maps(model) for part in _part_names(home)]


def init_magnitudes(adapted: Sequence[LoRA | EmbeddingLoRA]) -> None:
    """Initialise the DoRA magnitudes of new adapters."""
    for one in adapted:
        if isinstance(one, LoRA):
            one.init_magnitudes()


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The base model inside the block."""
    loras = list(adapters(model))
    before = [one.enabled for one in loras]
    for one in loras:
        one.enabled = False
    try:
        yield
    finally:
        for one, was in zip(loras, before, strict=True):
            one.enabled = was


def _maps(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    for path, module in model.named_modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | Vocabulary):
            yield path, module


def _part_names(home: Linear) -> list[str]:
    return list(home.parts) if isinstance(home, ColumnParallelLinear) else [""]


def _place(spec: ModelSpec, path: str, part: str) -> TensorLocation:
    inner = f"{path}.{part}" if part else path
    return source(spec.family, f"{inner}.weight")


def _name(spec: ModelSpec, path: str, part: str) -> str:
    return _place(spec, path, part).tensor.removesuffix(".weight")


def _adapt(
    path: str,
    home: Linear,
    spec: ModelSpec,
    adapter: AdapterSpec,
    build: ModelBuild,
    blanks: dict[Shape, LoRA] | None,
) -> LoRA | EmbeddingLoRA | None:
    names = {part: _name(spec, path, part) for part in _part_names(home)}
    covered = {part: name for part, name in names.items() if adapter.covers(name)}
    if not covered:
        return None
    if isinstance(home, Vocabulary):
        return _adapt_vocabulary(path, home, spec, adapter, build)
    place = _place(spec, path, next(iter(covered)))
    if place.parts > 1:
        raise UnsupportedModel(
            f"{place.tensor} holds several maps, which would share one matrix A",
            hint="choose other targets, such as c_proj and c_fc",
        )
    parts = _parts(home, adapter, covered)
    if blanks is None:
        return LoRA(build, home, parts, adapter.dora)
    shape = (home.shape_NK(), tuple(parts))
    if shape not in blanks:
        blanks[shape] = LoRA(build, home, parts, adapter.dora)
    return blanks[shape].at(home)


def _parts(home: Linear, adapter: AdapterSpec, covered: Mapping[str, str]) -> list[LoRAPart]:
    """`covered`: the names, in a checkpoint, of the parts that get an adapter."""
    if isinstance(home, ColumnParallelLinear):
        sizes = {name: (home.rows[name], home.parts[name]) for name in home.parts}
    elif isinstance(home, Vocabulary):
        sizes = {"": (home.rows, home.shape[0])}
    else:
        sizes = {"": (home.shape_NK()[0],) * 2}
    parts = []
    for name, (rows, total) in sizes.items():
        theirs = covered.get(name)
        rank = 0 if theirs is None else adapter.rank_of(theirs)
        scale = adapter.scale_of(theirs) if theirs is not None and rank else 0.0
        parts.append(LoRAPart(name, rows, total, rank, scale))
    return parts


def _adapt_vocabulary(
    path: str, home: Vocabulary, spec: ModelSpec, adapter: AdapterSpec, build: ModelBuild
) -> LoRA | EmbeddingLoRA:
    name = _name(spec, path, "")
    if spec.tied:
        raise UnsupportedModel(
            f"an adapter on {name}, which is tied to the output projection, has no clear meaning",
            hint="leave it out of the targets, or untie the embedding first",
        )
    if build.shards.size > 1:
        raise ConfigError(
            f"an adapter on {name} with tensor parallel {build.shards.size}",
            hint="leave it out of the targets, or use fsdp in place of tp",
        )
    if path != EMBEDDING:
        return LoRA(build, home, _parts(home, adapter, {"": name}), adapter.dora)
    if adapter.dora:
        raise UnsupportedModel(f"DoRA on {name}", hint="leave the embedding out of the targets")
    vocab, width = home.shape
    return EmbeddingLoRA(build, vocab, width, adapter.rank_of(name), adapter.scale_of(name))
