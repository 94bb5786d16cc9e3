"""Any layout behind the one interface: which parts of the model this rank holds, and how the ranks work together.

    parallelize(spec, mesh)  ->  stages of this rank  ->  ParallelModel, a `Parallel`

    tp, sp           the layers' own verbs (`tensor`)
    pp               the executor (`pipeline.run`)
    cp               the attend argument (`context`)
    ep               the expert layers (`expert`)
    dp, fsdp, zero   what becomes of gradients (`data`, `fsdp`, `zero`)

Each is written without the others; here they meet, and nowhere else. Gradients are those of one process with the whole
batch, whatever the layout.
"""

from collections.abc import Callable
from functools import partial

import msgspec
import torch

from cairn.models.adapter.attach import attach, init_magnitudes, map_names
from cairn.models.adapter.folder import adapter_slots
from cairn.models.adapter.quantized_base import quantize_base
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.build import ModelBuild, Slot
from cairn.models.shards import ALONE, Shards
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Transformer
from cairn.models.weights import fill_random
from cairn.train.fused_forward import FusedLayers
from cairn.train.offload import HostMemory, Offload, Plan, spread
from cairn.train.parallel.data import Replicas, Sync
from cairn.train.parallel.expert import Sharing, SpreadExperts, is_expert_weight
from cairn.train.parallel.layout import IN_V, Balance, Strategy, stages
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.microbatches import MakeAttend
from cairn.train.parallel.model import ParallelModel
from cairn.train.parallel.pipeline.actions import Placement, stage_of
from cairn.train.parallel.stage import ExpertMaker, Stage, share_of
from cairn.train.parallel.tensor import SequenceShards, TensorShards
from cairn.train.parallel.zero import Zero
from cairn.train.products import PLAIN, Products, through_products
from cairn.train.recompute_kinds import Recompute
from cairn.train.trainable import EVERYTHING, Trainable, freeze

# Gives tensors of a stage on the meta device their values.
Fill = Callable[[Stage, list[Slot]], None]


def parallelize(
    spec: ModelSpec,
    mesh: Mesh,
    strategy: Strategy = Strategy(),  # noqa: B008
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    fill: Fill | None = None,
    attend: MakeAttend | None = None,
    recompute: Recompute = "none",
    fused_context: int | None = None,
    products: Products = PLAIN,
    wide_sums: bool = True,
    balance: Balance = Balance(),  # noqa: B008
    trainable: Trainable = EVERYTHING,
    adapter: AdapterSpec | None = None,
    quantized: bool = False,
    offload: Plan | None = None,
) -> ParallelModel:
    """This rank's part of a model. `fill`: weights from elsewhere than `seed`; `attend`: how tokens attend alone.

    `fused_context`: layers run through the fused form, whose rotations reach so far; None: one operation after another.
    `products`: how linear maps multiply. `wide_sums`: add gradients of several microbatches in float32.
    `balance`: what keeps experts equally busy. `trainable`: which weights get gradients.
    `adapter`: what is added to the linear maps; its values are drawn by `seed`. `quantized`: over a base in 4 bits.
    `offload`: how many layers keep what backward needs in the host's memory; for stages that are not pipelined.

    The layout has been checked against the model (`layout.check`), as `run_checks.check_layout` does for a recipe.
    """
    spec = with_choice_bias(spec, balance)
    is_fused = fused_context is not None
    build = ModelBuild(
        "meta", dtype, _shards(mesh, strategy), fused=is_fused or products is not PLAIN
    )
    stages = build_stages(spec, build, mesh, strategy, balance)
    for stage in stages:
        stage.recompute = recompute
        _filled(stage, fill or partial(_fill_random, device=mesh.device, seed=seed), quantized)
        if fused_context is not None:
            stage.fuse(FusedLayers(spec, mesh.device, fused_context, products, recompute))
        elif products is not PLAIN:
            through_products(stage, products)
        if adapter is not None:
            _adapt(stage, spec, adapter, build, mesh.device, seed)
        freeze(stage, stage.slots(), trainable)
        if offload is not None and offload.layers:
            stage.offload = _offload(stage, offload, mesh.device)
    syncs = _syncs(stages, mesh, strategy, wide_sums)
    return ParallelModel(spec, stages, syncs, mesh, strategy, attend)


def _filled(stage: Stage, fill: Fill, quantized: bool) -> None:
    """All at once; in 4 bits layer by layer, so that there is never more than one layer in floating point."""
    slots = list(stage.slots())
    if not quantized:
        fill(stage, slots)
        return
    parts: dict[str, list[Slot]] = {}
    for slot in slots:
        path = slot.parameter.split(".")
        parts.setdefault(".".join(path[:2]) if path[0] == "layers" else "", []).append(slot)
    for path, some in parts.items():
        fill(stage, some)
        if path:
            quantize_base(stage.get_submodule(path))


def _offload(stage: Stage, plan: Plan, device: str) -> Offload:
    memory = HostMemory(torch.device(device).type == "cuda", plan.most_bytes)
    moved = spread(len(stage.layers), min(plan.layers, len(stage.layers)))
    return Offload(device, moved, memory)


def _adapt(
    stage: Stage, spec: ModelSpec, adapter: AdapterSpec, build: ModelBuild, device: str, seed: int
) -> None:
    """A new adapter on the maps of this stage, which changes nothing yet."""
    adapters = attach(stage, spec, adapter, build, map_names(Transformer(spec), spec))
    fill_random(stage, adapter_slots(stage), device, seed)
    init_magnitudes(adapters)


def build_stages(
    spec: ModelSpec,
    build: ModelBuild,
    mesh: Mesh,
    strategy: Strategy,
    balance: Balance = Balance(),  # noqa: B008
) -> list[Stage]:
    """The stages of this rank, on the meta device, one for each chunk."""
    count = stages(mesh.layout, strategy)
    placement: Placement = "v" if strategy.order in IN_V and count > 1 else "loop"
    make = _expert_maker(mesh, balance)
    built: list[Stage] = []
    for chunk in range(count // mesh.size("pp")):
        number = stage_of(placement, mesh.size("pp"), mesh.rank("pp"), chunk)
        embedding = next((s.embedding for s in built if s.embedding is not None), None)
        built.append(Stage(spec, build, share_of(spec.layers, number, count), make, embedding))
    return built


def with_choice_bias(spec: ModelSpec, balance: Balance) -> ModelSpec:
    """A bias that steers the choice of experts is a tensor of the model: it is exported, and served."""
    if not balance.bias or spec.experts is None or spec.experts.choice_bias:
        return spec
    experts = msgspec.structs.replace(spec.experts, choice_bias=True)
    return msgspec.structs.replace(spec, experts=experts)


def _expert_maker(mesh: Mesh, balance: Balance) -> ExpertMaker | None:
    if mesh.size("ep") == 1 and not balance.loss and not balance.bias:
        return None
    how = Sharing(mesh.group("ep"), mesh.group("cp"), balance.loss, balance.bias)
    return lambda build, spec, experts: SpreadExperts(build, spec, experts, how)


def _shards(mesh: Mesh, strategy: Strategy) -> Shards:
    if mesh.size("tp") == 1:
        return ALONE
    group = mesh.group("tp")
    return SequenceShards(group) if strategy.sequence_parallel else TensorShards(group)


def _fill_random(stage: Stage, slots: list[Slot], device: str, seed: int) -> None:
    # One that is shared with another stage has its values.
    blank = {name for name, p in stage.named_parameters() if p.is_meta}
    fill_random(stage, [slot for slot in slots if slot.parameter in blank], device, seed)


def _syncs(stages: list[Stage], mesh: Mesh, strategy: Strategy, wide_sums: bool) -> list[Sync]:
    """Gradient synchronisation by parameter: distributed experts separately from all others."""
    everything = {name: p for stage in stages for name, p in stage.named_parameters()}
    parameters = {name: p for name, p in everything.items() if p.requires_grad}
    all_experts = {n for n in everything if mesh.size("ep") > 1 and is_expert_weight(n)}
    experts = {n: p for n, p in parameters.items() if n in all_experts}
    dense = {n: p for n, p in parameters.items() if n not in experts}
    syncs: list[Sync] = []
    if mesh.size("fsdp") > 1:
        from cairn.train.parallel.fsdp import Fsdp  # torch's takes a second to import

        wide = torch.float32 if next(iter(everything.values())).dtype != torch.float32 else None
        # Experts have groups of their own, and the biases of routers are steered, not trained.
        apart = {p for n, p in everything.items() if n in all_experts or n.endswith(".bias_E")}
        whole_ones = strategy.whole_gradients
        syncs.append(Fsdp(stages, mesh, apart, wide, strategy.reshard, whole_ones))
    elif strategy.zero and mesh.group("replica") is not None:
        syncs.append(Zero(dense, mesh.group("replica"), strategy.zero))
    else:
        syncs.append(Replicas(dense, mesh.group("replica"), wide=wide_sums))
    if experts:
        syncs.append(Replicas(experts, mesh.group("expert_replica")))
    return syncs
