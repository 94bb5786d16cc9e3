"""`cairn train RECIPE --plan`: what the run would need in memory, on the device that it would run on."""

from typing import TYPE_CHECKING

import msgspec

from cairn.core.units import format_bytes, format_count
from cairn.train.config import Train

if TYPE_CHECKING:
    from cairn.models.spec import ModelSpec
    from cairn.train.memory import Memory


def show_plan(config: Train, as_json: bool) -> int:
    from cairn.models.checkpoint import default_device
    from cairn.train.describe import spec_of
    from cairn.train.run_checks import check_layout

    spec = spec_of(config.model)
    check_layout(config, spec, config.parallel.world())
    device = default_device() if config.device == "auto" else config.device
    fused = _is_fused(config, device, spec)
    memory, whose = _memory(spec, config, fused)
    sizes = {**memory.table(), "together": memory.total()}
    if as_json:
        about = {"family": spec.family, "parameters": spec.parameters(), "fused": fused}
        print(
            msgspec.json.encode({**about, "device": device, "of": whose, "bytes": sizes}).decode()
        )
        return 0
    form = "fused" if fused else "plain"
    about = f"{spec.family}, {format_count(spec.parameters())} parameters"
    print(f"{about}, {form} form on {device}; {whose}:")
    for name, size in sizes.items():
        print(f"  {name:<12} {format_bytes(size):>12}")
    if config.device == "auto" and device == "cpu":
        print("this machine has no GPU; --device cuda plans for one")
    return 0


def _is_fused(config: Train, device: str, spec: "ModelSpec") -> bool:
    """Return whether the run would go through our kernels; as `prepare.choose_form` decides."""
    if config.precision.kernels != "auto":
        return config.precision.kernels == "fused"
    return device != "cpu" and not spec.is_recurrent


def _memory(spec: "ModelSpec", config: Train, fused: bool) -> "tuple[Memory, str]":
    """Predicted memory and its scope: a rank's part if the planner supports the model."""
    from cairn.train.memory import head_is_trained, predict
    from cairn.train.trainable import frozen_values

    frozen = frozen_values(config, spec)
    layout, precision, strategy = config.parallel, config.precision, config.strategy
    if layout.world() == 1:
        return predict(spec, config, fused, frozen), "one process"
    planned = fused and precision.kind == "bfloat16"
    if not planned or strategy.zero or config.optim.offload:
        whole = predict(spec, config, fused, frozen)
        return whole, f"one process, which {layout.words()} would divide"
    from cairn.plan.train_cost import Choice, Job
    from cairn.plan.train_memory import rank_memory

    job = Job(
        spec=spec,
        sequence=config.data.sequence,
        sequences=config.data.sequences,
        states=config.optim.states,
    )
    choice = Choice(
        layout=layout,
        microbatch=config.data.microbatch,
        recompute="selective" if precision.recompute == "auto" else precision.recompute,
        order=strategy.order,
        chunks=strategy.chunks,
        sequence_parallel=strategy.sequence_parallel,
        whole_gradients=strategy.whole_gradients,
    )
    trained = _trained_share(spec, config, frozen)
    whose = "the fullest" if trained < 1.0 and layout.pp > 1 else "each"
    memory = rank_memory(job, choice, trained, head_is_trained(spec, config))
    return memory, f"{whose} of {layout.world()} ranks ({layout.words()})"


def _trained_share(spec: "ModelSpec", config: Train, frozen: int) -> float:
    """Trained share of a rank's weights; an adapter is sharded like its linear maps."""
    from cairn.train.parallel.trained_share import largest_trained_share
    from cairn.train.trainable import trainable_of

    if config.adapter.rank or not frozen:
        return 1 - frozen / spec.parameters()
    return largest_trained_share(spec, trainable_of(config), config.parallel, config.strategy)
