"""The variants of `route` that are compiled and the shapes at which it is measured."""

from collections.abc import Iterator
from typing import Any

import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.experts.route import (
    Routing,
    _constants,
    _route_kernel,
    cost,
    route,
    route_reference,
)
from cairn.kernels.kernel import Case, Prepared, Variant

KERNEL = "cairn.kernels.experts.route"

QWEN3_30B = (128, Routing(8))
DEEPSEEK_V3 = (256, Routing(8, "sigmoid", scale=2.5))


def _variant(name: str, count: int, routing: Routing, **given: str) -> Variant:
    types = dict(
        logits="*bf16", chosen="*i32", weights="*fp32", stride="i32", scale="fp32", **given
    )
    absent: dict[str, Any] = dict.fromkeys({"bias", "slots"} - given.keys())
    constants = {**_constants(count, routing), **absent, "OVERLAP": True}
    aligned = tuple(n for n in types if n != "scale")
    return Variant(f"route {name}", _route_kernel, types, constants, {"num_warps": 1}, aligned)


VARIANTS = [
    _variant("softmax, 8 of 128", *QWEN3_30B, slots="*i64"),
    _variant("sigmoid with bias, 8 of 256", *DEEPSEEK_V3, bias="*fp32"),
]


def cases() -> Iterator[Case]:
    count, routing = QWEN3_30B
    for tokens in (1, 256, 8192):
        work = cost(tokens, count, routing.per_token)
        name = f"{tokens} x {count}, {routing.per_token} each"
        yield Case(
            "route", name, "bf16", work, lambda t=tokens: _prepare(t, count, routing), graph=True
        )


def _prepare(tokens: int, count: int, routing: Routing) -> Prepared:
    logits_TE = torch.randn(tokens, count, device="cuda").to(torch.bfloat16)
    _, exact_TK = route_reference(logits_TE.double(), routing)

    def by_torch() -> object:
        scores_TE = logits_TE.float().softmax(-1)
        weights_TK, _ = scores_TE.topk(routing.per_token, dim=-1)
        return weights_TK / weights_TK.sum(-1, keepdim=True)

    return Prepared(
        lambda: route(logits_TE, routing, impl="triton"),
        {"softmax, topk": by_torch},
        lambda: relative_error(route(logits_TE, routing, impl="triton")[1], exact_TK),
    )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
