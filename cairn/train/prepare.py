"""From a recipe to everything a loop needs: device, model, data, optimizer. All that can be wrong is found here.

    config -> corpus -> spec -> layout fits? -> room on the disk? -> weights -> state

The order is that of cost: a typo is answered at once, and gigabytes move last.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from cairn.core.errors import ConfigError
from cairn.core.units import format_bytes
from cairn.kernels.attention.attention_problem import WIDTHS
from cairn.models.build import Build
from cairn.models.checkpoint import Checkpoint, check_device, default_device, open_checkpoint
from cairn.models.hub import resolve
from cairn.models.presets import preset
from cairn.models.spec import ModelSpec
from cairn.models.tokenizer import Tokenizer
from cairn.models.tokenizer_folder import tokenizer_from_folder
from cairn.models.transformer import Transformer
from cairn.models.weights import load_model, random_model
from cairn.train.checkpoint.folder import complete_steps
from cairn.train.config import Model, Train
from cairn.train.corpus import Corpus, open_corpus
from cairn.train.data import procedural
from cairn.train.fused_forward import FusedTraining, Varlen
from cairn.train.loss import NextToken
from cairn.train.memory import fitting, room_of, with_recompute
from cairn.train.metrics_log import check_sinks
from cairn.train.optim.optimizer import make_optimizer
from cairn.train.parallel.alone import Alone, packed
from cairn.train.parallel.interface import Parallel
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.pipeline.schedules import schedule
from cairn.train.parallel.pipeline.simulate import simulate
from cairn.train.parallel.stage import Stage
from cairn.train.parallel.wrap import parallelize
from cairn.train.precision import dtype_of
from cairn.train.products import make_products, through_products
from cairn.train.recompute import recomputing
from cairn.train.recompute_kinds import Recompute
from cairn.train.refuse import (
    CHECKPOINTS,
    check_balance,
    check_folder,
    check_goes_on,
    check_layout,
    check_memory,
    check_room,
    is_balanced,
)
from cairn.train.state import TrainState

TOKENIZER = "tokenizer"  # of a run, in its folder
MUCH_IDLE = 0.2  # of a step, which a person wants to know of
SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "context")


class Prepared(NamedTuple):
    state: TrainState
    corpus: Corpus
    fused: bool
    notes: list[str]  # automatic choices, each with its reason


def prepare(config: Train) -> Prepared:
    name = default_device() if config.device == "auto" else config.device
    check_device(name)
    check_sinks(config.log)
    check_folder(config)
    device = torch.device(name)
    corpus, spec, start = describe(config)
    check_layout(config, spec, config.parallel.world())
    check_balance(config, spec)
    check_goes_on(config, spec)
    check_room(config, spec)
    check_memory(config, spec, name)
    if config.parallel.world() == 1 and not is_balanced(config):
        return assemble_alone(config, device, corpus, spec, start)
    return _prepare_spread(config, device, corpus, spec, start)


def describe(config: Train) -> tuple[Corpus, ModelSpec, Checkpoint | None]:
    """The data and the shape of the model; reads headers, trains a small tokenizer, loads no weights."""
    start = _open_start(config.model)
    spec = start.spec if start else shape_of(config.model)
    learnt = _tokenizer_of_run(config) or _tokenizer_of(start)
    corpus = open_corpus(config.data, config.seed, spec.vocab, learnt)
    return corpus, _fitted(spec, corpus, config, start is not None), start


def spec_of(model: Model) -> ModelSpec:
    """The shape that will be trained, but for the vocabulary, which the data may change."""
    start = _open_start(model)
    return start.spec if start else shape_of(model)


def _open_start(model: Model) -> Checkpoint | None:
    """The weights to begin with, by path or by name; headers only."""
    return open_checkpoint(resolve(str(model.checkpoint))) if model.checkpoint else None


def _tokenizer_of_run(config: Train) -> Tokenizer | None:
    """What the checkpoints of a run that goes on were trained with; None: there are none."""
    kept = config.out / TOKENIZER if config.out else None
    if kept is None or not kept.is_dir() or not complete_steps(kept.parent / CHECKPOINTS):
        return None
    return tokenizer_from_folder(kept)


def _tokenizer_of(start: Checkpoint | None) -> Tokenizer | None:
    """What the weights were trained with; None: there are none, or they do not say."""
    if start is None or (start.path.is_dir() and not (start.path / "tokenizer.json").is_file()):
        return None
    return start.tokenizer()


def _shadowed(config: Train) -> list[str]:
    """Sources that are made up although a file or folder here has their name."""
    found = (name for name in config.data.sources if name in (*procedural.NAMES, "random"))
    return [f"the source {name} is made up; what lies here under that name is ./{name}"
            for name in found if Path(name).exists()]  # fmt: skip


def shape_of(model: Model) -> ModelSpec:
    chosen = {name: getattr(model, name) for name in SIZES if getattr(model, name)}
    return msgspec.structs.replace(preset(model.preset), **chosen)


def _fitted(spec: ModelSpec, corpus: Corpus, config: Train, given: bool) -> ModelSpec:
    """With the vocabulary and the end-of-text tokens of the data."""
    if config.data.sequence > spec.context:
        raise ConfigError(
            f"data.sequence {config.data.sequence} is longer than the model's context {spec.context}",
            hint=f"use data.sequence {spec.context}, or model.context {config.data.sequence}",
        )
    if corpus.tokenizer is None:
        return spec
    if given or config.model.vocab:
        if corpus.vocab > spec.vocab:
            raise ConfigError(
                f"the tokenizer has ids up to {corpus.vocab - 1}, the model {spec.vocab} tokens",
                hint="use the model's own tokenizer: --data.tokenizer FOLDER",
            )
        return spec
    eos = tuple(corpus.tokenizer.eos_ids)
    return msgspec.structs.replace(spec, vocab=corpus.vocab, eos_ids=eos, bos_id=None)


def build_model(
    config: Train, spec: ModelSpec, device: torch.device, start: Checkpoint | None, fused: bool
) -> Transformer:
    build = Build(str(device), dtype_of(config.precision), fused=fused)
    if start is None:
        return random_model(spec, build, config.seed)
    return load_model(spec, start.tensors, build)


def assemble_alone(
    config: Train, device: torch.device, corpus: Corpus, spec: ModelSpec, start: Checkpoint | None
) -> Prepared:
    fused, why = choose_form(config, device)
    notes = [f"{'fused' if fused else 'plain'} form because {why}", *_shadowed(config)]
    config, found = settle_recompute(config, spec, device, fused)
    notes += found
    fp8 = config.precision.fp8
    model = build_model(config, spec, device, start, fused=fused or fp8 != "none")
    products = make_products(fp8)
    parallel: Parallel
    if fused:
        form = FusedTraining(model, config.data.sequence, products, _kind(config))
        parallel = Alone(model, form, form.attend, config.precision.masters)
    else:
        if fp8 != "none":
            through_products(model, products)
        forward = recomputing(model, _kind(config))
        parallel = Alone(model, forward, packed, config.precision.masters)
    return Prepared(_state(config, spec, parallel, device, fused), corpus, fused, notes)


def _prepare_spread(
    config: Train, device: torch.device, corpus: Corpus, spec: ModelSpec, start: Checkpoint | None
) -> Prepared:
    """One of several processes, whose process group exists; or one with experts that have to be balanced."""
    if config.precision.fp8 != "none":
        what = (
            "balanced experts"
            if config.parallel.world() == 1
            else f"the layout {config.parallel.words()}"
        )
        raise ConfigError(
            f"fp8 with {what} is not there yet",
            hint="set precision.fp8 to none, or train on one GPU without a balance",
        )
    fused, why = choose_form(config, device)
    config, found = settle_recompute(config, spec, device, fused)
    mesh = Mesh.join(config.parallel, str(device))
    on_gpu = device.type == "cuda"
    parallel = parallelize(
        spec, mesh, config.spread, dtype=dtype_of(config.precision), seed=config.seed,
        fill=None if start is None else partial(_fill, spec=spec, start=start, device=device),
        attend=Varlen if on_gpu and spec.head_dim in WIDTHS else None,
        recompute=_kind(config), fused_context=config.data.sequence if fused else None,
    )  # fmt: skip
    form = f"{'fused' if fused else 'plain'} form because {why}"
    notes = [f"layout {config.parallel.words()}, {form}", *found]
    notes += _shadowed(config) + _idle(config)
    if config.spread.balance_bias:
        notes.append("balance_bias is kept in checkpoints; an exported model routes without it")
    return Prepared(_state(config, spec, parallel, device, on_gpu), corpus, fused, notes)


def _idle(config: Train) -> list[str]:
    """What the pipeline's schedule costs, where it is much."""
    pp, order, microbatches = config.parallel.pp, config.spread.order, config.microbatches
    if pp == 1:
        return []
    chunks = config.spread.chunks if order == "interleaved" else None
    share = simulate(schedule(order, pp, microbatches, chunks)).bubble
    if share < MUCH_IDLE:
        return []
    several = "microbatches leave" if microbatches > 1 else "microbatch leaves"
    return [f"pipeline {order}: {microbatches} {several} each rank idle for {share:.0%} of a step; "
            "smaller ones (data.microbatch) leave less"]  # fmt: skip


def _state(
    config: Train, spec: ModelSpec, parallel: Parallel, device: torch.device, fused: bool
) -> TrainState:
    optimizer = make_optimizer(
        parallel.parameters(), config.optim, config.precision.masters, config.seed,
        parallel.named_state, parallel.matrices(),
    )  # fmt: skip
    loss = NextToken(spec, config.precision.z_loss, fused)
    return TrainState(config, spec, parallel, optimizer, loss, device)


def settle_recompute(
    config: Train, spec: ModelSpec, device: torch.device, fused: bool
) -> tuple[Train, list[str]]:
    """The recipe without `auto`, and what was chosen in its place."""
    precision = config.precision
    if precision.recompute != "auto":
        return config, []
    kind: Recompute
    if device.type != "cuda":
        kind, why = "none", "the host's memory is not counted"
    elif config.parallel.world() > 1:
        kind, why = "selective", "the layout divides what is predicted for one process"
    else:
        room = room_of(precision, torch.cuda.get_device_properties(device).total_memory)
        kind, why = fitting(spec, config, fused, room), f"{format_bytes(int(room))} may be used"
    note = f"recompute {kind} because {why}; override: --precision.recompute"
    return with_recompute(config, kind), [note]


def _kind(config: Train) -> Recompute:
    kind = config.precision.recompute
    assert kind != "auto"  # settled
    return kind


def _fill(stage: Stage, spec: ModelSpec, start: Checkpoint, device: torch.device) -> None:
    """This rank's part of a checkpoint's weights; the whole of them is only mapped, not read."""
    whole = load_model(spec, start.tensors, Build("cpu", start.stored_dtype()))
    known = {slot.name: whole.get_parameter(slot.parameter)[slot.index] for slot in whole.slots()}
    stage.to_empty(device=device)
    for slot in stage.slots():
        home = stage.get_parameter(slot.parameter).data
        home[slot.index].copy_(slot.share(known[slot.name]))


def choose_form(config: Train, device: torch.device) -> tuple[bool, str]:
    """Whether the model runs through our kernels, and why."""
    asked = config.precision.kernels
    if asked != "auto":
        return asked == "fused", "precision.kernels says so"
    if device.type != "cuda":
        return False, f"on a {device.type} torch's own operations are faster"
    return True, "our kernels need fewer passes"
