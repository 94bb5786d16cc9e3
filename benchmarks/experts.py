"""One layer of experts of Qwen3-30B-A3B on a GPU: as it is served, as it is trained, and its grouped products.

    python benchmarks/experts.py --out benchmarks/h200/experts.json

    serving     route, sort, gate and up with SwiGLU, down, weighed; up to 512 tokens before a norm sums their parts
    training    forward and backward of 8,192 tokens
    products    65,536 rows: torch's grouped product, ours as a layer calls it, and as much work in one product of
                cuBLAS; routed so, and evenly; evenly also on whole numbers up to 2 and on zeros, which take less power

Tokens choose uniformly, as random weights do, or by Zipf's law (an expert's chance is 1 / its rank), as trained routers
may. The floor is the time in which the visited experts are copied, or their products multiplied, at the rates that are
measured in the same run.
"""

import argparse
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from cairn.bench.limit import measure_ceiling
from cairn.bench.record import add_arguments, record
from cairn.hw.timing import measure, measure_graph
from cairn.kernels.experts.grouped_matmul import SWIGLU, grouped_matmul
from cairn.kernels.experts.sort_pairs import Pairs, sort_pairs
from cairn.models.build import ModelBuild
from cairn.models.experts import ExpertLayer
from cairn.models.fused_experts import experts_product
from cairn.models.grouped_product import grouped_product
from cairn.models.linear.form import Kernels
from cairn.models.presets import preset
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Layer
from cairn.models.weights import random_model
from cairn.train.expert_products import trained_experts

TOKENS = (1, 8, 32, 128, 1024, 16384)
TRAINED, ROWS, INPUTS = 8192, 65536, 8
CALLS = 64  # in a graph, as a model has layers
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": torch.randn_like,
    "integers up to 2": lambda like: torch.randint_like(like, -2, 3),
    "zeros": torch.zeros_like,
}
FEW = 512  # tokens whose parts the next norm sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--device", default="cuda")
    add_arguments(parser)
    options = parser.parse_args()
    spec = msgspec.structs.replace(preset(options.shape), layers=1, vocab=1024)
    layer = expert_layer(spec, options.device)
    ceiling = measure_ceiling(options.device, "bf16")
    rates = (ceiling.bytes_per_s, ceiling.flops_per_s["bf16"])
    rows = [served(layer, tokens, skew, rates) for skew in (0.0, 1.0) for tokens in TOKENS]
    results = {"shape": options.shape, "serving": rows, "training": trained(layer, rates)}
    record(results | {"products": products(layer)}, options)


def expert_layer(spec: ModelSpec, device: str) -> ExpertLayer:
    first = random_model(spec, ModelBuild(device, torch.bfloat16, fused=True)).layers[0]
    assert isinstance(first, Layer)
    assert isinstance(first.feed_forward, ExpertLayer)
    layer = first.feed_forward
    # Logits are the first columns of a token, so that its choice can be dictated.
    layer.router.weight.data.copy_(torch.eye(*layer.router.weight.shape))
    return layer


def choosing(layer: ExpertLayer, tokens: int, skew: float, seed: int) -> Tensor:
    """Tokens that choose each expert with a chance of 1 / rank ** skew, without replacement (Gumbel's way)."""
    like: dict[str, Any] = {"device": layer.inner_EFD.device}
    draw = torch.Generator(like["device"]).manual_seed(seed)
    x_TD = torch.randn(tokens, layer.hidden, generator=draw, **like)
    count = layer.experts.count
    uniform_TE = torch.rand(tokens, count, generator=draw, **like).clamp(1e-6, 1 - 1e-6)
    log_chance_E = -skew * torch.arange(1, count + 1, **like).log()
    x_TD[:, :count] = log_chance_E - (-uniform_TE.log()).log()
    return x_TD.bfloat16()


def served(
    layer: ExpertLayer, tokens: int, skew: float, rates: tuple[float, float]
) -> dict[str, object]:
    inputs = [(choosing(layer, tokens, skew, seed),) for seed in range(INPUTS)]
    kernels = Kernels()

    def call(x_TD: Tensor) -> object:
        return experts_product(layer, x_TD, x_TD if tokens <= FEW else None, kernels)

    with torch.inference_mode():
        few = tokens <= FEW
        timing = (
            measure_graph(call, inputs, calls=CALLS)
            if few
            else measure(call, inputs, device="cuda")
        )
        visited = sum(len(layer.router(x_TD)[1].unique()) for (x_TD,) in inputs) / INPUTS
    each = layer.inner_EFD[0].nbytes + layer.down_EDF[0].nbytes
    pairs = tokens * layer.experts.per_token
    floor = max(
        visited * each / rates[0], pairs * each / rates[1]
    )  # 2 FLOPs and 2 bytes of each weight
    return {
        "tokens": tokens,
        "routing": f"zipf({skew:g})" if skew else "uniform",
        "us": timing.median_s * 1e6,
        "visited": visited,
        "floor_us": floor * 1e6,
        "of_floor": floor / timing.median_s,
    }


def trained(layer: ExpertLayer, rates: tuple[float, float]) -> dict[str, object]:
    x_TD = choosing(layer, TRAINED, 0.0, 0).requires_grad_()
    dy_TD = torch.randn_like(x_TD)
    parameters = [layer.inner_EFD, layer.down_EDF, layer.router.weight]
    for parameter in parameters:
        parameter.requires_grad_()

    def step() -> object:
        return torch.autograd.grad(trained_experts(layer, x_TD), [x_TD, *parameters], dy_TD)

    seconds = measure(step, device="cuda", budget_ms=200).median_s
    for parameter in parameters:
        parameter.requires_grad_(False)
    pairs = TRAINED * layer.experts.per_token
    floor = 3 * pairs * (layer.inner_EFD[0].nbytes + layer.down_EDF[0].nbytes) / rates[1]
    return {"tokens": TRAINED, "ms": seconds * 1e3, "of_floor": floor / seconds}


def products(layer: ExpertLayer) -> list[dict[str, object]]:
    """TFLOP/s by way, routing and numbers; a gathered product reads a row for each token."""
    count, per_token = layer.experts.count, layer.experts.per_token
    x_TD = choosing(layer, ROWS // per_token, 0.0, 0)
    even_TK = torch.arange(ROWS, device=x_TD.device).view(-1, per_token) % count
    found: list[dict[str, object]] = []
    with torch.inference_mode():
        routed = {"uniform": layer.router(x_TD)[1], "even": even_TK}
        for routing, numbers in [("uniform", "normal"), *(("even", kind) for kind in NUMBERS)]:
            pairs = sort_pairs(routed[routing].int().contiguous(), count)
            for name, (call, flops) in ways(layer, pairs, NUMBERS[numbers]).items():
                rate = flops / measure(call, device="cuda").median_s
                row: dict[str, object] = {"product": name, "routing": routing, "numbers": numbers}
                found.append(row | {"rows": ROWS, "tflops": rate / 1e12})
    return found


def ways(
    layer: ExpertLayer, pairs: Pairs, draw: Callable[[Tensor], Tensor]
) -> dict[str, tuple[Callable[[], object], float]]:
    """The products of a layer by name, and their operations."""
    inner, down = (draw(w) for w in layer.matrices() if isinstance(w, Tensor))
    _, height, hidden = inner.shape
    x_TD = draw(inner.new_empty(ROWS // pairs.per_token, hidden))
    rows_PD = x_TD[pairs.order_P.long() // pairs.per_token]
    hidden_PF = draw(inner.new_empty(ROWS, down.shape[2]))
    a_MD, b_ND = (
        draw(inner.new_empty(ROWS // 8, hidden)),
        draw(inner.new_empty(8 * height, hidden)),
    )
    first, second = (2.0 * ROWS * w[0].numel() for w in (inner, down))
    return {
        "gate and up, torch": (lambda: grouped_product(rows_PD, inner, pairs.ends_E), first),
        "gate and up, rows in order": (lambda: grouped_matmul(rows_PD, inner, pairs), first),
        "gate and up, gathered, SwiGLU": (
            lambda: grouped_matmul(x_TD, inner, pairs, gather=True, gating=SWIGLU),
            first,
        ),
        "as much work in one matrix, cuBLAS": (lambda: a_MD @ b_ND.T, first),
        "down, torch": (lambda: grouped_product(hidden_PF, down, pairs.ends_E), second),
        "down": (lambda: grouped_matmul(hidden_PF, down, pairs), second),
    }


if __name__ == "__main__":
    main()
