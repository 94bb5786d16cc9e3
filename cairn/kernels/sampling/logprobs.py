"""Log-probabilities of given tokens and of the n likeliest, from raw logits, in one pass and without a sort.

    logprob[v] = logits[v] - log(sum of exp(logits))

One program for a row. It keeps the sum of exponentials, and the two largest of each of LANES interleaved columns; the
n likeliest are then taken from those one by one. A lane that has given both of its two (rare: n of LANES lanes) reads
its own columns again for the next. Where nothing is left but -inf, the next is searched for in the row itself. Equal
logits: the lower token first. Raw means before temperature, penalties and cuts, which is what clients compare models
by. Serves chosen tokens and, with one row for each token, whole prompts. Bytes moved: the logits once.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, INTEGERS, check, output, require, short
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.sampling.sampling_search import (
    LN_2,
    LOG2_E,
    NOTHING,
    first_of_largest,
    scores_at,
)
from cairn.kernels.tuned import tuned

MOST = 32  # likeliest tokens


class LogProbs(NamedTuple):
    token_B: Tensor  # float32: of the given tokens
    top_Bn: Tensor  # float32: the largest, in order
    ids_Bn: Tensor  # int32: whose they are


def logprobs_reference(logits_BV: Tensor, tokens_B: Tensor, n: int) -> LogProbs:
    exact_BV = logits_BV.double().log_softmax(-1)
    order = (
        logits_BV.float().sort(dim=-1, descending=True, stable=True).indices[:, :n]
    )  # stable: lower first
    token_B = exact_BV.gather(1, tokens_B.long()[:, None])[:, 0]
    return LogProbs(token_B.float(), exact_BV.gather(1, order).float(), order.int())


@triton.jit
def _after(logits, previous, token, VOCABULARY: tl.constexpr, LANES: tl.constexpr):
    """The largest that comes after (previous, token), by a pass over the row."""
    lane = tl.arange(0, LANES)
    best = tl.full([LANES], float("-inf"), tl.float32)
    chosen = tl.full([LANES], VOCABULARY, tl.int32)
    for start in tl.range(0, VOCABULARY, LANES, num_stages=1):
        column = start + lane
        score = scores_at(logits, column, VOCABULARY)
        later = (score < previous) | ((score == previous) & (column > token))
        better = later & ((score > best) | (chosen == VOCABULARY)) & (column < VOCABULARY)
        best = tl.where(better, score, best)
        chosen = tl.where(better, column, chosen)
    return tl.max(best, 0), first_of_largest(best, chosen)


@triton.jit
def _after_in_lane(
    logits, previous, token, VOCABULARY: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """The largest that comes after (previous, token) in the token's lane, of DEPTH columns; -inf: there is none."""
    column = token % LANES + tl.arange(0, DEPTH) * LANES
    score = scores_at(logits, column, VOCABULARY)
    later = (score < previous) | ((score == previous) & (column > token))
    score = tl.where(later, score, float("-inf"))
    return tl.max(score, 0), first_of_largest(score, column)


@triton.jit
def _logprobs_kernel(
    logits, tokens, of_token, top, ids, logits_stride,
    VOCABULARY: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    lane = tl.arange(0, LANES)
    first = tl.full([LANES], float("-inf"), tl.float32)
    second = tl.full([LANES], float("-inf"), tl.float32)
    first_id = tl.full([LANES], VOCABULARY, tl.int32)
    second_id = tl.full([LANES], VOCABULARY, tl.int32)
    sums = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, VOCABULARY, LANES, num_stages=STAGES):
        column = start + lane
        score = scores_at(logits, column, VOCABULARY)
        larger = tl.maximum(tl.maximum(first, score), NOTHING)
        sums = sums * tl.math.exp2((first - larger) * LOG2_E) + tl.math.exp2(
            (score - larger) * LOG2_E
        )
        if N > 0:
            leads = score > first
            follows = score > second
            second_id = tl.where(leads, first_id, tl.where(follows, column, second_id))
            second = tl.where(leads, first, tl.where(follows, score, second))
            first_id = tl.where(leads, column, first_id)
            first = tl.where(leads, score, first)
        else:
            first = tl.maximum(first, score)
    largest = tl.maximum(tl.max(first, 0), NOTHING)
    total = tl.sum(sums * tl.math.exp2((tl.maximum(first, NOTHING) - largest) * LOG2_E), 0)
    level = largest + tl.math.log2(total) * LN_2
    token = tl.load(tokens + row)
    inside = (token >= 0) & (token < VOCABULARY)
    chosen = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    tl.store(of_token + row, chosen - level)

    if N > 0:
        given = tl.zeros([LANES], tl.int32)  # how many each lane has given
        value = float("inf")
        winner = -1
        for place in tl.range(0, N, num_stages=1):
            if tl.max(first, 0) > float("-inf"):
                value = tl.max(first, 0)
                winner = first_of_largest(first, first_id)
                mine = first_id == winner
                first = tl.where(mine, second, first)
                first_id = tl.where(mine, second_id, first_id)
                second = tl.where(mine, float("-inf"), second)
                second_id = tl.where(mine, VOCABULARY, second_id)
                given += mine.to(tl.int32)
                if tl.max(tl.where(mine, given, 0), 0) >= 2:
                    third, third_id = _after_in_lane(
                        logits, value, winner, VOCABULARY, LANES, DEPTH
                    )
                    first = tl.where(mine, third, first)
                    first_id = tl.where(mine, third_id, first_id)
            else:
                value, winner = _after(logits, value, winner, VOCABULARY, LANES)
            tl.store(top + row * N + place, value - level)
            tl.store(ids + row * N + place, winner)


def logprobs(
    logits_BV: Tensor,
    tokens_B: Tensor,
    n: int = 0,
    *,
    out: LogProbs | None = None,
    impl: Impl = "auto",
) -> LogProbs:
    """Of each row's token, and of its `n` (up to 32) likeliest."""
    check("logits", logits_BV, dtypes=FLOATS, shape=(None, None))
    batch, vocabulary = logits_BV.shape
    require(
        logits_BV.stride(1) == 1 or vocabulary == 1,
        "logits",
        "stride 1 in the last dimension",
        logits_BV.stride(),
    )
    check("tokens", tokens_B, dtypes=INTEGERS, shape=(batch,), beside=logits_BV, packed=True)
    require(0 <= n <= min(MOST, vocabulary), "n", f"0 to {min(MOST, vocabulary)}", n)
    token_B, top_Bn, ids_Bn = out or (None, None, None)
    room = LogProbs(
        output("out.token", token_B, (batch,), torch.float32, logits_BV),
        _rows("out.top", top_Bn, (batch, n), torch.float32, logits_BV),
        _rows("out.ids", ids_Bn, (batch, n), torch.int32, logits_BV),
    )
    if (
        choose("logprobs", impl, {"triton": needs_cuda(logits_BV), "reference": None}).impl
        == "reference"
    ):
        for target, result in zip(room, logprobs_reference(logits_BV, tokens_B, n), strict=True):
            target.copy_(result)
    elif batch:
        plan = Plan(**tuned("logprobs", _key(vocabulary, logits_BV.dtype, n), Plan()._asdict()))
        kernel: Any = _logprobs_kernel
        kernel[(batch,)](
            logits_BV, tokens_B, *room, logits_BV.stride(0), VOCABULARY=vocabulary, LANES=plan.lanes,
            DEPTH=triton.next_power_of_2(triton.cdiv(vocabulary, plan.lanes)), STAGES=plan.stages, N=n,
            num_warps=plan.warps,
        )  # fmt: skip
    return room


def _rows(
    name: str, given: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, beside: Tensor
) -> Tensor:
    if given is None:
        return torch.empty(shape, dtype=dtype, device=beside.device)
    return check(name, given, dtypes=(dtype,), shape=shape, beside=beside, packed=True)


class Plan(NamedTuple):
    """How a launch is laid out; the table of tuned configurations names the same fields."""

    lanes: int = 2048
    warps: int = 8
    stages: int = 6


def _key(vocabulary: int, dtype: torch.dtype, n: int) -> str:
    return f"vocabulary={vocabulary},{short(dtype)},{'top' if n else 'token'}"


def cost(batch: int, vocabulary: int, bytes_each: int = 2) -> Cost:
    return Cost(flops=3.0 * batch * vocabulary, bytes=float(batch * vocabulary * bytes_each))
