"""What does it cost to remember less? About a third more arithmetic, for a fraction of the memory.

    none   every operation of every layer keeps what its gradient needs
    full   a layer keeps its input, T x D numbers; backward computes the layer again     F + 2F  ->  2F + 2F
           (but for its last product: only what a gradient needs is computed again)

Memory is what is still alive after forward, counted by storage; FLOPs are counted by torch. Both beside the formulas
that the planner uses, and the gradients must be the same to the last bit.
"""

from typing import Any, NamedTuple

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.pytorch._tiny_model import tiny_model, tokens_of
from cairn.labs.workbench import Workbench


class Pass(NamedTuple):
    alive_bytes: int  # between forward and backward
    flops: int  # of both
    gradients: list[Any]


def predicted_flops(spec: Any) -> float:
    """With full recomputing over without: 4F / 3F, less the last product, whose result is not needed again."""
    last = spec.hidden * spec.intermediate
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    all_products = spec.hidden * (2 * queries + 2 * keys) + 3 * last
    return (4 - last / all_products) / 3


def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.train.config import Precision
    from cairn.train.memory import layer_bytes

    model = tiny_model(layers=4, hidden=128, head_dim=32, intermediate=384)
    tokens = bench.setting("tokens", bench.pick(256, 64))
    passes = {}
    for kind in ("none", "selective", "full"):
        bench.step(f"recompute {kind}")
        passes[kind] = _pass(model.spec, tokens_of(model, tokens), kind)
    everything, one = layer_bytes(model.spec, Precision(recompute="none"), tokens, fused=False)
    inputs = layer_bytes(model.spec, Precision(recompute="full"), tokens, fused=False)[0] - one
    differing = sum(
        int((a != b).sum())
        for kind in ("selective", "full")
        for a, b in zip(passes["none"].gradients, passes[kind].gradients, strict=True)
    )
    return Outcome(
        checks=_checks(everything, passes, inputs, model, differing),
        table=Table(
            columns=[Words("kind", "方式"), Words("KiB kept", "保留 KiB"), Words("MFLOP", "MFLOP")],
            rows=[[kind, p.alive_bytes / 1024, p.flops / 1e6] for kind, p in passes.items()],
        ),
        notes=[
            Words(
                f"{torch.get_num_threads()} threads; counts do not depend on them.",
                f"{torch.get_num_threads()} 个线程；计数与此无关。",
            )
        ],
    )


def _checks(
    everything: int, passes: dict[str, Pass], inputs: int, model: Any, differing: int
) -> list[Check]:
    return [
        Check(
            what=Words("kept by all layers without recomputing", "不重计算时各层保留的字节"),
            predicted=everything / 1024,
            measured=passes["none"].alive_bytes / 1024,
            unit="KiB",
            within=0.25,
        ),
        Check(
            what=Words(
                "kept with full recomputing: one input per layer",
                "完全重计算时保留的字节：每层一个输入",
            ),
            predicted=inputs / 1024,
            measured=passes["full"].alive_bytes / 1024,
            unit="KiB",
            within=0.35,
        ),
        Check(
            what=Words("FLOPs with full over without", "完全重计算与不重计算的 FLOP 之比"),
            predicted=predicted_flops(model.spec),
            measured=passes["full"].flops / passes["none"].flops,
            unit="x",
            within=0.01,
        ),
        Check(
            what=Words("numbers of the gradients that differ", "梯度中不同的数的个数"),
            predicted=0.0,
            measured=float(differing),
            unit="",
        ),
    ]


def _pass(spec: Any, tokens_T: Any, kind: Any) -> Pass:
    from torch.utils.flop_counter import FlopCounterMode

    from cairn.labs.pytorch._watched import Watched
    from cairn.models.attend import PackedDocuments
    from cairn.train.parallel.mesh import Mesh
    from cairn.train.parallel.parallelize import parallelize

    (model,) = parallelize(spec, Mesh.alone(), recompute=kind).stages
    attend = PackedDocuments([len(tokens_T)])
    positions_T = attend.positions_T()
    with Watched() as watched:
        states_TD = model(tokens_T, positions_T, attend)
    # The last norm and the rotations belong to no layer; what the loss would keep is not there yet.
    alive = watched.alive_bytes(apart_from=(states_TD, *model.parameters()))
    alive -= _outside_layers(model, len(tokens_T))
    with FlopCounterMode(display=False) as counter:
        model(tokens_T, positions_T, attend).square().sum().backward()
    gradients = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    return Pass(alive, counter.get_total_flops(), gradients)


def _outside_layers(model: Any, tokens: int) -> int:
    """Cosines and sines of the positions, and what the last norm keeps: its input, before and after the "
    "scaling."""
    spec = model.spec
    return 4 * tokens * (2 * spec.head_dim + 2 * spec.hidden)


LAB = described(__file__, run)
