"""The variants of `sampling` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.sampling.sampling import (
    PHASES,
    Batch,
    _constants,
    _key,
    _usual,
    cost,
    random_batch,
    sample,
    sample_reference,
)
from cairn.kernels.sampling.sampling_kernel import sample_kernel
from cairn.kernels.tuned import Tuning

KERNEL = "cairn.kernels.sampling.sampling"


TYPES = dict(
    logits="*bf16", tokens="*i32", temperatures="*fp32", top_ks="*i32", top_ps="*fp32", min_ps="*fp32", seeds="*i64",
    positions="*i32", rows="*i32", groups="*i32", counts="*i32",
    columns="*i32", values="*fp32", notes="*fp32", logits_stride="i32", vocabulary="i32", parts="i32",
)  # fmt: skip


VARIANTS = [
    Variant(
        f"sampling 151936 {kind} {name}",
        sample_kernel,
        TYPES | {"logits": f"*{kind}"},
        _constants(_usual(dtype), dtype, True, phase),
        _usual(dtype).options(phase),
        tuple(argument for argument in TYPES if argument != "parts"),
    )
    for kind, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
    for name, phase in PHASES.items()
]


def _prepare(batch: int, dtype: torch.dtype, **how: Any) -> Prepared:
    data = random_batch(batch, 151936, dtype, **how)

    def ours() -> Tensor:
        return sample(data.logits_BV, data.parameters, data.position_B, out=data.out_B)

    def error() -> float:
        """The share of tokens that float64 would have chosen otherwise."""
        data.out_B.fill_(-1)
        exact_B = sample_reference(data.logits_BV, data.parameters, data.position_B)
        return float((ours() != exact_B).double().mean())

    return Prepared(ours, {"torch sort": lambda: _by_sorting(data)}, error)


def _by_sorting(data: Batch) -> Tensor:
    """Baseline with torch operations: sort, truncate, softmax, exponential race."""
    how = data.parameters
    scores_BV = data.logits_BV.float() / how.temperature_N[:, None]
    sorted_BV, order_BV = scores_BV.sort(descending=True)
    k_B1 = torch.where(how.top_k_N > 0, how.top_k_N, scores_BV.shape[1])[:, None]
    place_V = torch.arange(scores_BV.shape[1], device=scores_BV.device)
    weights_BV = sorted_BV.masked_fill(place_V >= k_B1, -torch.inf).softmax(-1)
    before_BV = weights_BV.cumsum(-1) - weights_BV
    weights_BV = weights_BV.masked_fill(before_BV >= how.top_p_N[:, None], 0.0)
    race_BV = weights_BV / torch.empty_like(weights_BV).exponential_()
    return order_BV.gather(1, race_BV.argmax(-1, keepdim=True))[:, 0]


SETTINGS: dict[str, dict[str, Any]] = {
    "top-p 0.9 top-k 50": {"top_k": 50, "top_p": 0.9},
    "top-p 0.9": {"top_p": 0.9},
    "temperature": {},
    "greedy": {"temperature": 0.0},
}


def cases() -> Iterator[Case]:
    """Within the figure asked for while `fraction_of_ceiling` is above a third; a single row is latency."""
    for batch, dtype in ((256, torch.bfloat16), (256, torch.float32), (1, torch.bfloat16)):
        for name, how in SETTINGS.items():
            yield Case(
                "sampling", f"{batch} x 151936 {name}", "bf16" if dtype == torch.bfloat16 else "fp32",
                cost(batch, 151936, dtype.itemsize), lambda b=batch, d=dtype, h=how: _prepare(b, d, **h), graph=True,
            )  # fmt: skip


def tuning() -> Iterator[Tuning]:
    for dtype in (torch.bfloat16, torch.float32):

        def prepare(dtype: torch.dtype = dtype) -> Callable[[], object]:
            return _prepare(256, dtype, top_k=50, top_p=0.9).ours

        yield Tuning(
            _key(151936, dtype),
            [_usual(dtype)._replace(warps=warps)._asdict() for warps in (8, 16)],
            prepare,
        )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
