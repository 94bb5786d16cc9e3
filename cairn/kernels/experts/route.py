"""Expert routing: scores, top-k and weights in one launch.

    logits [T, E]  ->  softmax or sigmoid  ->  the k best by score + bias  ->  chosen [T, k], weights [T, k]

Everything is computed in float32, one token per program; of equal scores the lower expert wins. The bias steers the
choice, never the weights. A token whose slot in the cache is negative is padding and visits nobody: its experts are -1
and its weights 0. Choosing among groups of experts is not done here.
"""

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, INTEGERS, as_rows, check, require
from cairn.kernels.dependent import begin, pdl
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost

MOST_EXPERTS = 512
LARGEST = tl.constexpr(0x7FFFFFFF)


class Routing(NamedTuple):
    """Routing parameters."""

    per_token: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0


def route_reference(
    logits_TE: Tensor,
    routing: Routing,
    bias_E: Tensor | None = None,
    slots_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    wide_TE = logits_TE.double() if logits_TE.dtype == torch.float64 else logits_TE.float()
    scores_TE = wide_TE.softmax(-1) if routing.score == "softmax" else wide_TE.sigmoid()
    biased_TE = scores_TE if bias_E is None else scores_TE + bias_E
    chosen_TK = biased_TE.sort(dim=-1, descending=True, stable=True).indices[:, : routing.per_token]
    weights_TK = scores_TE.gather(1, chosen_TK)
    if routing.renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    weights_TK = weights_TK * routing.scale
    if slots_T is not None:
        chosen_TK = chosen_TK.masked_fill(slots_T[:, None] < 0, -1)
        weights_TK = weights_TK.masked_fill(slots_T[:, None] < 0, 0.0)
    return chosen_TK.int(), weights_TK


@triton.jit
def _route_kernel(
    logits, bias, slots, chosen, weights, stride, scale,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr,
    SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    token = tl.program_id(0)
    e = tl.arange(0, WIDTH)
    inside = e < COUNT
    z = tl.load(logits + token * stride + e, mask=inside, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        raised = tl.exp(z - tl.max(z, axis=0))
        scores = raised / tl.sum(raised, axis=0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-z))
    biased = scores
    if bias is not None:
        biased += tl.load(bias + e, mask=inside, other=0.0)
    # Whole numbers in the same order: a warp has one instruction for their maximum.
    score_bits = scores.to(tl.int32, bitcast=True)  # of numbers from 0 on
    bits = biased.to(tl.int32, bitcast=True)
    left = tl.where(inside, bits ^ ((bits >> 31) & LARGEST), ~LARGEST)
    slot = tl.arange(0, SLOTS)
    experts = tl.full([SLOTS], -1, tl.int32)
    picked = tl.zeros([SLOTS], tl.int32)
    for k in tl.static_range(PER_TOKEN):
        best = tl.min(tl.where(left == tl.max(left, axis=0), e, WIDTH), axis=0)
        value = tl.max(tl.where(e == best, score_bits, 0), axis=0)
        experts = tl.where(slot == k, best, experts)
        picked = tl.where(slot == k, value, picked)
        left = tl.where(e == best, ~LARGEST, left)
    values = picked.to(tl.float32, bitcast=True)
    if RENORMALIZE:
        values = values / tl.sum(values, axis=0)
    values = values * scale
    if slots is not None:
        blank = tl.load(slots + token) < 0
        experts = tl.where(blank, -1, experts)
        values = tl.where(blank, 0.0, values)
    at = token * PER_TOKEN + slot
    tl.store(chosen + at, experts, mask=slot < PER_TOKEN)
    tl.store(weights + at, values, mask=slot < PER_TOKEN)


def route(
    logits_TE: Tensor,
    routing: Routing,
    bias_E: Tensor | None = None,
    slots_T: Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Chosen experts [T, k] int32 and their weights [T, k] float32. `slots_T`: negative for padding."""
    check("logits_TE", logits_TE, dtypes=FLOATS, shape=(None, None))
    tokens, count = logits_TE.shape
    fine = 1 <= routing.per_token <= count
    require(fine, "per_token", f"1 to {count} of {count} experts", routing.per_token)
    known = routing.score in ("softmax", "sigmoid")
    require(known, "score", "'softmax' or 'sigmoid'", repr(routing.score))
    if bias_E is not None:
        check("bias_E", bias_E, dtypes=FLOATS, shape=(count,), beside=logits_TE, packed=True)
    if slots_T is not None:
        check("slots_T", slots_T, dtypes=INTEGERS, shape=(tokens,), beside=logits_TE, packed=True)
    many = f"{count} experts are more than {MOST_EXPERTS}" if count > MOST_EXPERTS else None
    offers = {"triton": needs_cuda(logits_TE) or many, "reference": None}
    if choose("route", impl, offers).impl == "reference":
        return route_reference(logits_TE, routing, bias_E, slots_T)
    chosen_TK = torch.empty(tokens, routing.per_token, dtype=torch.int32, device=logits_TE.device)
    weights_TK = torch.empty_like(chosen_TK, dtype=torch.float32)
    if tokens:
        rows = as_rows("logits_TE", logits_TE)
        kernel: Any = _route_kernel
        kernel[(tokens,)](
            rows, bias_E, slots_T, chosen_TK, weights_TK, rows.stride(0), routing.scale,
            **_constants(count, routing), num_warps=1, **pdl(logits_TE.device),
        )  # fmt: skip
    return chosen_TK, weights_TK


def _constants(count: int, routing: Routing) -> dict[str, int | bool]:
    slots = 1 << (routing.per_token - 1).bit_length()
    return dict(
        COUNT=count, WIDTH=1 << (count - 1).bit_length(), PER_TOKEN=routing.per_token, SLOTS=slots,
        SOFTMAX=routing.score == "softmax", RENORMALIZE=routing.renormalize,
    )  # fmt: skip


def cost(tokens: int, count: int, per_token: int) -> Cost:
    return Cost(4.0 * tokens * count * per_token, tokens * (2.0 * count + 8.0 * per_token))
