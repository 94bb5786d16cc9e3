"""A few steps of plain gradient descent, on one process or on many, and whether they were the same."""

import msgspec
import torch
import torch._dynamo  # fully_shard imports it: once here, rather than two seconds in every rank
from plain_model import PlainModel

from cairn.models.presets import preset
from cairn.models.spec import ModelSpec
from cairn.train import offload
from cairn.train.data.batch import IGNORED, Batch, make_batch
from cairn.train.objective import Objective
from cairn.train.parallel.layout import Layout, Strategy
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.parallelize import parallelize

SEED, RATE = 7, 0.03  # a large rate would make rounding errors grow from step to step
Trace = dict[str, list]  # losses, norms, gradients of the last step and weights after it


def spec_of(name: str, **changes) -> ModelSpec:
    return msgspec.structs.replace(preset(name), **changes)


def batches(spec: ModelSpec, step: int, count: int, tokens: int = 16) -> list[Batch]:
    """Documents of uneven lengths, some targets without a loss; the same for everybody."""
    found = []
    for number in range(count):
        generator = torch.Generator().manual_seed(1000 * step + number)
        tokens_T = torch.randint(spec.vocab, (tokens + 1,), generator=generator)
        targets_T = tokens_T[1:].clone()
        targets_T[torch.rand(tokens, generator=generator) < 0.2 + 0.1 * number] = IGNORED
        cut = int(torch.randint(1, tokens - 3, (1,), generator=generator))
        found.append(make_batch(tokens_T[:-1], targets_T, [cut, tokens - cut - 2, 2], [number]))
    return found


def train(parallel, spec: ModelSpec, steps: int, per_step: int, tokens: int = 16) -> Trace:
    """Each data rank takes its slice of the step's microbatches."""
    loss, trace = Objective(spec), {"losses": [], "norms": []}
    for step in range(steps):
        every = batches(spec, step, per_step, tokens)
        each = per_step // parallel.data_ranks
        mine = every[parallel.data_rank * each : (parallel.data_rank + 1) * each]
        count = torch.tensor(float(sum(batch.valid() for batch in mine)))
        valid = parallel.sum_over_data(count)
        share = parallel.forward_backward(mine, loss, valid)
        trace["losses"].append(float(parallel.sum_over_data(share)))
        trace["norms"].append(float(parallel.grad_norm()))
        gradients = {name: g.clone() for name, g in parallel.gradients().items()}
        trace["gradients"] = _pieces(parallel.named_state(gradients))
        with torch.no_grad():
            for name, parameter in parallel.parameters().items():
                parameter.sub_(RATE * gradients[name])
        parallel.steer_routers(torch.ones(()))
        parallel.zero_grad()
    trace["weights"] = _pieces(parallel.named_state())
    return trace


def _pieces(state) -> dict:
    return {name: (p.tensor.clone(), p.shape, p.offsets) for name, p in state.items()}


def alone(spec: ModelSpec, steps: int, per_step: int, tokens: int = 16) -> Trace:
    return train(PlainModel(spec, SEED), spec, steps, per_step, tokens)


def one_rank(
    rank: int,
    world: int,
    spec: ModelSpec,
    layout: Layout,
    options: Strategy,
    steps: int,
    per_step: int,
    tokens: int = 16,
    recompute: str = "none",
    fused: bool = False,
    moved: int = 0,
) -> Trace:
    """`moved`: layers whose activations are offloaded, however small."""
    mesh, offload.SMALL = Mesh.join(layout), 0
    parallel = parallelize(
        spec,
        mesh,
        options,
        seed=SEED,
        recompute=recompute,
        fused_context=tokens if fused else None,
        offload=offload.Plan(moved, 1e9),
    )
    trace = train(parallel, spec, steps, per_step, tokens)
    trace["executed"] = parallel.executed
    return trace


def assert_same(traces: list[Trace], expected: Trace, tolerance: float = 1e-5) -> None:
    """Losses and norms on every rank, and every element of gradients and weights, none of them missing."""
    for rank, trace in enumerate(traces):
        for key in ("losses", "norms"):
            for step, (mine, theirs) in enumerate(zip(trace[key], expected[key], strict=True)):
                error = abs(mine - theirs) / max(1.0, abs(theirs))
                assert error < tolerance, f"rank {rank} {key} of step {step}: {mine}, not {theirs}"
    for key in ("gradients", "weights"):
        seen = {
            name: torch.zeros(shape, dtype=torch.bool)
            for name, (_, shape, _) in expected[key].items()
        }
        for rank, trace in enumerate(traces):
            for name, (part, shape, offsets) in trace[key].items():
                whole, expected_shape, _ = expected[key][name]
                assert shape == expected_shape, name
                here = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
                error = (part - whole[here]).abs().max().item() if part.numel() else 0.0
                assert error < tolerance, f"rank {rank} {key} of {name}: off by {error:.1e}"
                seen[name][here] = True
        missing = [name for name, mask in seen.items() if not mask.all()]
        assert not missing, f"{key}: nobody has all of {missing}"
