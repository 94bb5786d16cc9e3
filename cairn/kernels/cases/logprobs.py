"""The variants of `logprobs` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Iterator

import torch
import triton

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.sampling.logprobs import (
    LogProbs,
    Plan,
    _key,
    constants,
    cost,
    logprobs,
    logprobs_reference,
)
from cairn.kernels.sampling.logprobs_kernel import _likeliest_kernel, _logprobs_kernel
from cairn.kernels.tuned import Tuning

KERNEL = "cairn.kernels.sampling.logprobs"


SCAN = dict(logits="*bf16", sums_of="*fp32", top="*fp32", ids="*i32", logits_stride="i32")
CHOOSE = dict(
    logits="*bf16", tokens="*i32", of_token="*fp32", top="*fp32", ids="*i32", sums_of="*fp32",
    top_of="*fp32", ids_of="*i32", logits_stride="i32",
)  # fmt: skip


def _variants(kind: str, n: int) -> Iterator[Variant]:
    fixed = constants(Plan(), 151936, n)
    parts = fixed["PARTS"]
    room = triton.next_power_of_2(max(1, parts * n))
    last = dict(VOCABULARY=151936, PARTS=parts, ROOM=room, N=n)
    logits = {"logits": f"*{kind}"}
    for part, kernel, types, numbers, warps in (
        ("parts", _logprobs_kernel, SCAN, fixed, Plan().warps),
        ("likeliest", _likeliest_kernel, CHOOSE, last, 1),
    ):
        yield Variant(
            f"logprobs 151936 {kind} top {n} {part}",
            kernel,
            types | logits,
            numbers,
            {"num_warps": warps},
            tuple(types),
        )


VARIANTS = [
    variant
    for kind, n in (("bf16", 0), ("bf16", 20), ("fp32", 20))
    for variant in _variants(kind, n)
]


def _prepare(dtype: torch.dtype, n: int) -> Prepared:
    logits_BV = 3 * torch.randn(256, 151936, device="cuda", dtype=dtype)
    tokens_B = torch.randint(151936, (256,), device="cuda")
    room = logprobs_reference(logits_BV, tokens_B, n)
    room = LogProbs(*(tensor.clone() for tensor in room))

    def ours() -> LogProbs:
        return logprobs(logits_BV, tokens_B, n, out=room)

    def error() -> float:
        poison(*room)
        exact = logprobs_reference(logits_BV, tokens_B, n)
        return max(relative_error(ours(), exact), float((room.ids_Bn != exact.ids_Bn).any()))

    def torchs() -> object:
        scores_BV = logits_BV.float().log_softmax(-1)
        return scores_BV.gather(1, tokens_B[:, None]), scores_BV.topk(max(n, 1))

    return Prepared(ours, {"torch": torchs}, error)


def cases() -> Iterator[Case]:
    for dtype, bytes_each in ((torch.bfloat16, 2), (torch.float32, 4)):
        for n in (0, 5, 20):
            yield Case(
                "logprobs", f"256 x 151936 top {n}", "bf16" if bytes_each == 2 else "fp32",
                cost(256, 151936, bytes_each), lambda d=dtype, n=n: _prepare(d, n), 1e-5, graph=True,
            )  # fmt: skip


def tuning() -> Iterator[Tuning]:
    plans = [Plan(), Plan(1024, 4, 2), Plan(1024, 4, 4, 4), Plan(1024, 4, 4, 16), Plan(2048, 8, 4)]
    for dtype in (torch.bfloat16, torch.float32):
        for n in (0, 20):
            yield Tuning(
                _key(151936, dtype, n),
                [plan._asdict() for plan in plans],
                lambda d=dtype, n=n: _prepare(d, n).ours,
            )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
