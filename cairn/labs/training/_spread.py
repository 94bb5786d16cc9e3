"""A few steps of plain gradient descent on a tiny model, alone or over ranks, and how far the two are apart.

    alone(setting)                      one process, the whole batch
    run_ranks(n, on_ranks, setting)     the same batch in any layout
    difference(traces, expected)        the largest one, of losses, norms and every element of gradients and weights

Every batch is a pure function of its number, so nothing is sent around. Knows no lab.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cairn.models.presets import preset
from cairn.models.spec import ModelSpec
from cairn.train.parallel.layout import Layout, Strategy

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch

SEED, RATE = 7, 0.03
Trace = dict[str, Any]  # losses and norms by step; pieces of gradients and weights of the last one


class Setting(NamedTuple):
    spec: ModelSpec
    layout: Layout = Layout()
    strategy: Strategy = Strategy()
    steps: int = 2
    per_step: int = 2  # microbatches of one step, all ranks together
    tokens: int = 16  # of a microbatch


def tiny(name: str = "tiny-qwen3", **changes: Any) -> ModelSpec:
    """A preset of a few thousand parameters whose sizes divide by two and four."""
    fields: dict[str, Any] = dict(layers=4, heads=4, kv_heads=4, vocab=160)
    return msgspec.structs.replace(preset(name), **(fields | changes))


def batches(setting: Setting, step: int) -> "list[Batch]":
    """Documents of uneven lengths, and targets without a loss: the cases in which averages go wrong."""
    import torch

    from cairn.train.data.batch import IGNORED, make_batch

    batches, tokens = [], setting.tokens
    for number in range(setting.per_step):
        generator = torch.Generator().manual_seed(1000 * step + number)
        tokens_T = torch.randint(setting.spec.vocab, (tokens + 1,), generator=generator)
        targets_T = tokens_T[1:].clone()
        targets_T[torch.rand(tokens, generator=generator) < 0.1 + 0.5 * (number % 2)] = IGNORED
        cut = int(torch.randint(1, tokens - 3, (1,), generator=generator))
        batches.append(make_batch(tokens_T[:-1], targets_T, [cut, tokens - cut - 2, 2], [number]))
    return batches


def alone(setting: Setting) -> Trace:

    from cairn.train.parallel.mesh import Mesh
    from cairn.train.parallel.parallelize import parallelize

    return train(parallelize(setting.spec, Mesh.alone(), seed=SEED), setting)


def on_ranks(rank: int, count: int, setting: Setting) -> Trace:
    parallel = spread(setting)
    trace = train(parallel, setting)
    trace["executed"] = [str(action) for action in parallel.executed]
    return trace


def spread(setting: Setting) -> Any:
    """This rank's part of the model; called on every rank."""
    from cairn.train.parallel.mesh import Mesh
    from cairn.train.parallel.parallelize import parallelize

    return parallelize(setting.spec, Mesh.join(setting.layout, "cpu"), setting.strategy, seed=SEED)


def train(parallel: Any, setting: Setting) -> Trace:
    """Each data rank takes its slice of the step's microbatches."""
    import torch

    from cairn.train.objective import Objective

    loss = Objective(setting.spec)
    trace: Trace = {"losses": [], "norms": []}
    for step in range(setting.steps):
        every = batches(setting, step)
        each = setting.per_step // parallel.data_ranks
        mine = every[parallel.data_rank * each : (parallel.data_rank + 1) * each]
        count = torch.tensor(float(sum(batch.valid() for batch in mine)))
        share = parallel.forward_backward(mine, loss, parallel.sum_over_data(count))
        trace["losses"].append(float(parallel.sum_over_data(share)))
        trace["norms"].append(float(parallel.grad_norm()))
        gradients = {name: one.clone() for name, one in parallel.gradients().items()}
        trace["gradients"] = _pieces(parallel.named_state(gradients))
        with torch.no_grad():
            for name, parameter in parallel.parameters().items():
                parameter.sub_(RATE * gradients[name])
        parallel.zero_grad()
    trace["weights"] = _pieces(parallel.named_state())
    return trace


def difference(traces: list[Trace], expected: Trace) -> float:
    """The largest difference; infinite where no rank has some element."""
    import torch

    worst = 0.0
    for trace in traces:
        for key in ("losses", "norms"):
            for mine, theirs in zip(trace[key], expected[key], strict=True):
                worst = max(worst, abs(mine - theirs) / max(1.0, abs(theirs)))
    for key in ("gradients", "weights"):
        covered = {
            name: torch.zeros(whole.shape, dtype=torch.bool)
            for name, (whole, _) in expected[key].items()
        }
        for trace in traces:
            for name, (part, offsets) in trace[key].items():
                here = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
                if part.numel():
                    worst = max(worst, float((part - expected[key][name][0][here]).abs().max()))
                covered[name][here] = True
        if not all(mask.all() for mask in covered.values()):
            return float("inf")
    return worst


def _pieces(state: Any) -> dict[str, Any]:
    return {name: (piece.tensor.clone(), piece.offsets) for name, piece in state.items()}
