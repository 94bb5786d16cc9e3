"""Preparation of a run: device, model, data, optimizer. All configuration errors are found here.

    config -> corpus -> spec -> layout fits? -> room on the disk? -> weights -> state

The order is that of cost: a typo is answered at once, and gigabytes move last.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import nn

from cairn.kernels.attention.attention_problem import WIDTHS
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.build import ModelBuild, Slot
from cairn.models.checkpoint import Checkpoint, check_device, default_device
from cairn.models.spec import ModelSpec
from cairn.models.weights import load_model
from cairn.train.choose_recompute import host_room, recompute_kind, resolve_recompute
from cairn.train.config import Train
from cairn.train.corpus import Corpus
from cairn.train.data import procedural
from cairn.train.describe import describe
from cairn.train.distill import Distillation, check_distill
from cairn.train.fused_forward import Varlen
from cairn.train.metrics_log import check_sinks
from cairn.train.objective import NextToken, Objective
from cairn.train.offload import Plan
from cairn.train.optim.optimizer import make_optimizer
from cairn.train.pair_objective import PairObjective
from cairn.train.parallel.interface import Loss, Parallel
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.parallelize import Fill, parallelize
from cairn.train.parallel.pipeline.schedules import schedule
from cairn.train.parallel.pipeline.simulate import simulate
from cairn.train.parallel.stage import Stage
from cairn.train.precision import dtype_of
from cairn.train.qat import grid_of, products_of
from cairn.train.rules.choose import rule_of
from cairn.train.run_checks import (
    check_balance,
    check_folder,
    check_goes_on,
    check_layout,
    check_memory,
    check_room,
)
from cairn.train.state import TrainState
from cairn.train.trainable import Base, adapter_of, base_of, frozen_values, trainable_of

MUCH_IDLE = 0.2  # of a step, which a person wants to know of


class Prepared(NamedTuple):
    state: TrainState
    corpus: Corpus
    fused: bool
    frozen: int  # values that are not trained
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
    check_distill(config)
    grid_of(config, spec)  # refuses what cannot be rounded
    check_goes_on(config, spec)
    frozen = frozen_values(config, spec)
    check_room(config, spec, frozen)
    check_memory(config, spec, name, frozen)
    return assemble(config, device, corpus, spec, start)


def _shadowed(config: Train) -> list[str]:
    """Sources that are made up although a file or folder here has their name."""
    names = (name for name in config.data.sources if name in (*procedural.NAMES, "random"))
    return [
        f"the source {name} is made up; what lies here under that name is ./{name}"
        for name in names
        if Path(name).exists()
    ]


def assemble(
    config: Train, device: torch.device, corpus: Corpus, spec: ModelSpec, start: Checkpoint | None
) -> Prepared:
    """The model and its optimizer, of the only process or of one of several whose process group exists."""
    fused, why = choose_form(config, device, spec)
    trainable, adapter = trainable_of(config), adapter_of(config)
    frozen = frozen_values(config, spec)
    config, chosen = resolve_recompute(config, spec, device, fused, frozen)
    precision = config.precision
    by_kernels = fused or (device.type == "cuda" and precision.kernels != "plain")
    parallel = parallelize(
        spec,
        Mesh.join(config.parallel, str(device)),
        config.strategy,
        dtype=dtype_of(precision),
        seed=config.seed,
        fill=None if start is None else _fill_from(start, spec, device),
        attend=Varlen if by_kernels and _has_kernels(spec) else None,
        recompute=recompute_kind(config),
        fused_context=config.data.sequence if fused else None,
        products=products_of(config, spec),
        wide_sums=precision.masters,
        balance=config.balance,
        trainable=trainable,
        adapter=adapter,
        quantized=adapter is not None and config.adapter.base == "nf4",
        offload=_offload(config),
    )
    form = f"{'fused' if fused else 'plain'} form because {why}"
    layout = "" if config.parallel.world() == 1 else f"layout {config.parallel.words()}, "
    notes = [f"{layout}{form}", *chosen, *_shadowed(config), *_idle(config)]
    notes += _frozen_notes(spec, adapter, frozen)
    state = _state(config, spec, parallel, device, by_kernels, base_of(config, start))
    return Prepared(state, corpus, fused, frozen, notes)


def _offload(config: Train) -> Plan | None:
    layers = config.precision.offload_layers
    return Plan(layers, host_room(config)) if layers else None


def _frozen_notes(spec: ModelSpec, adapter: AdapterSpec | None, frozen: int) -> list[str]:
    """Log lines about frozen parameters."""
    if adapter is not None:
        trained = spec.parameters() - frozen
        return [f"adapter of rank {adapter.rank}: {trained:,} values are trained, the weights stay"]
    share = frozen / spec.parameters()
    return [f"{share:.0%} of the weights are frozen (model.frozen)"] if frozen else []


def _idle(config: Train) -> list[str]:
    """Log lines about a large pipeline bubble."""
    pp, order, microbatches = config.parallel.pp, config.strategy.order, config.microbatches
    if pp == 1:
        return []
    chunks = config.strategy.chunks if order == "interleaved" else None
    share = simulate(schedule(order, pp, microbatches, chunks)).bubble
    if share < MUCH_IDLE:
        return []
    several = "microbatches leave" if microbatches > 1 else "microbatch leaves"
    return [
        f"pipeline {order}: {microbatches} {several} each rank idle for {share:.0%} of a step; "
        "smaller ones (data.microbatch) leave less"
    ]


def _state(
    config: Train,
    spec: ModelSpec,
    parallel: Parallel,
    device: torch.device,
    fused: bool,
    base: Base | None,
) -> TrainState:
    optimizer = make_optimizer(
        parallel.parameters(),
        config.optim,
        config.precision.masters,
        config.seed,
        parallel.named_state,
        parallel.matrices(),
    )
    loss: Loss = Objective(spec, NextToken(config.precision.z_loss), fused)
    if config.objective.kind != "sft":
        loss = PairObjective(spec, rule_of(config.objective), fused)
    if config.distill.teacher:
        loss = Distillation(spec, config.distill, config.precision.z_loss)
    return TrainState(config, spec, parallel, optimizer, loss, device, base)


def _fill_from(start: Checkpoint, spec: ModelSpec, device: torch.device) -> Fill:
    """This rank's part of a checkpoint's weights; the whole of them is only mapped, not read."""
    if spec.experts is not None and start.spec.experts is not None:
        experts = msgspec.structs.replace(spec.experts, choice_bias=start.spec.experts.choice_bias)
        spec = msgspec.structs.replace(spec, experts=experts)
    whole = load_model(spec, start.tensors, ModelBuild("cpu", start.stored_dtype()))
    tensors = {slot.name: whole.get_parameter(slot.parameter)[slot.index] for slot in whole.slots()}

    def fill(stage: Stage, slots: list[Slot]) -> None:
        for path in dict.fromkeys(slot.parameter for slot in slots):
            owner, _, name = path.rpartition(".")
            blank = stage.get_parameter(path)
            if blank.is_meta:
                parameter = nn.Parameter(
                    torch.empty_like(blank, device=device), blank.requires_grad
                )
                setattr(stage.get_submodule(owner), name, parameter)
        for slot in slots:
            home = stage.get_parameter(slot.parameter).data
            if slot.name in tensors:
                home[slot.index].copy_(slot.share(tensors[slot.name]))
            else:  # the bias of a router that begins to be steered
                home[slot.index].zero_()

    return fill


def _has_kernels(spec: ModelSpec) -> bool:
    """Return whether the attention kernels support the model; recurrent layers use the plain form."""
    return spec.head_dim in WIDTHS and not spec.latent and not spec.is_recurrent


def choose_form(config: Train, device: torch.device, spec: ModelSpec) -> tuple[bool, str]:
    """Choose between fused and plain form, with the reason."""
    configured = config.precision.kernels
    if configured != "auto":
        return configured == "fused", "precision.kernels says so"
    if device.type != "cuda":
        return False, f"on a {device.type} torch's own operations are faster"
    if spec.is_recurrent:
        return False, "a state along the sequence is carried by torch's own operations"
    return True, "our kernels need fewer passes"
