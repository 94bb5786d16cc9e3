"""The variants of `combine` that are compiled and the shapes at which it is measured."""

from collections.abc import Iterator

import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.experts.combine import _combine_kernel, combine, combine_reference, cost
from cairn.kernels.experts.combine_norm import _combine_norm_kernel, warps_of
from cairn.kernels.experts.sort_pairs import sort_pairs_reference
from cairn.kernels.kernel import Case, Prepared, Variant

KERNEL = "cairn.kernels.experts.combine"


def _norm_variant(fp8: bool, columns: int = 2048) -> Variant:
    pointers = dict(results="*bf16", places="*i32", weights="*fp32", residual="*bf16")
    pointers |= dict(norm_weight="*bf16", y="*fp8e4nv" if fp8 else "*bf16", total="*bf16")
    pointers |= dict(scale="*fp32") if fp8 else {}
    strides = [f"{name}_stride" for name in ("residual", "y", "total")]
    fixed = dict(PER_TOKEN=8, PLUS_ONE=False, COLUMNS=columns, WIDTH=columns, OVERLAP=True)
    return Variant(
        f"combine 8 of {columns} columns + residual + norm{' + fp8' * fp8}",
        _combine_norm_kernel,
        pointers | dict.fromkeys(strides, "i32") | {"eps": "fp32"},
        fixed | ({} if fp8 else {"scale": None}),
        {"num_warps": warps_of(columns)},
        [*pointers, *strides],
    )


VARIANTS = [
    _norm_variant(fp8=False),
    _norm_variant(fp8=True),
    Variant(
        "combine 8 of 2048 columns",
        _combine_kernel,
        dict(results="*bf16", places="*i32", weights="*fp32", y="*bf16", D="i32"),
        dict(PER_TOKEN=8, WIDTH=1024, OVERLAP=True),
        {"num_warps": 4},
        ("results", "places", "weights", "y", "D"),
    ),
]


def cases() -> Iterator[Case]:
    for tokens in (1024, 8192):
        yield Case(
            "combine",
            f"{tokens} x 8 of 2048",
            "bf16",
            cost(tokens, 8, 2048),
            lambda t=tokens: _prepare(t),
        )


def _prepare(tokens: int, per_token: int = 8, columns: int = 2048) -> Prepared:
    results_PD = torch.randn(tokens * per_token, columns, device="cuda").to(torch.bfloat16)
    chosen_TK = torch.rand(tokens, 128, device="cuda").topk(per_token).indices.int()
    places_P = sort_pairs_reference(chosen_TK, 128).places_P
    weights_TK = torch.rand(tokens, per_token, device="cuda")

    def error() -> float:
        exact = combine_reference(results_PD.double(), places_P, weights_TK.double())
        return relative_error(combine(results_PD, places_P, weights_TK, impl="triton"), exact)

    def by_torch() -> object:
        rows_TKD = results_PD[places_P.long()].unflatten(0, weights_TK.shape)
        return (rows_TKD * weights_TK[..., None].to(results_PD.dtype)).sum(1)

    ours = lambda: combine(results_PD, places_P, weights_TK, impl="triton")  # noqa: E731
    return Prepared(ours, {"gather, multiply, sum": by_torch}, error)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
