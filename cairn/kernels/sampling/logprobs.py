"""Log-probabilities of given tokens and of the n likeliest, from raw logits, in one pass and without a sort.

    logprob[v] = logits[v] - log(sum of exp(logits))

PARTS programs for a row: each keeps the sum of exponentials of its columns, and the two largest of each of LANES
interleaved ones; its n likeliest are then taken from those one by one. A lane that has given both of its two (rare: n
of LANES lanes) reads its own columns again for the next. Where nothing is left but -inf, the next is searched for in
the part itself. A second launch takes the n likeliest of all parts. Equal logits: the lower token first. How many
parts there are depends on the vocabulary alone, so a row's result does not depend on its batch. Raw means before
temperature, penalties and cuts, which is what clients compare models by. Serves chosen tokens and, with one row for
each token, whole prompts. Bytes moved: the logits once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.kernels.arguments import FLOATS, INTEGERS, check, output, require, short
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.tuned import tuned

MOST = 32  # likeliest tokens


class LogProbs(NamedTuple):
    token_B: Tensor  # float32: of the given tokens
    top_Bn: Tensor  # float32: the largest, in order
    ids_Bn: Tensor  # int32: whose they are


def packed_size(batch: int, n: int) -> int:
    """Number of float32 values that `views_of` needs."""
    return _whole(batch) + _whole(batch * n) + batch * n


def views_of(packed: Tensor, batch: int, n: int) -> LogProbs:
    """Room for results, one behind the other in `packed`, so that one copy sends them."""
    top, ids = _whole(batch), _whole(batch) + _whole(batch * n)
    return LogProbs(
        packed[:batch],
        packed[top : top + batch * n].view(batch, n),
        packed[ids : ids + batch * n].view(torch.int32).view(batch, n),
    )


def _whole(count: int) -> int:
    """Up to a multiple of 16 bytes: for an address that is none a kernel is compiled once more, while a user waits."""
    return -(-count // 4) * 4


def logprobs_reference(logits_BV: Tensor, tokens_B: Tensor, n: int) -> LogProbs:
    exact_BV = logits_BV.double().log_softmax(-1)
    order = (
        logits_BV.float().sort(dim=-1, descending=True, stable=True).indices[:, :n]
    )  # stable: lower first
    token_B = exact_BV.gather(1, tokens_B.long()[:, None])[:, 0]
    return LogProbs(token_B.float(), exact_BV.gather(1, order).float(), order.int())


def logprobs(
    logits_BV: Tensor,
    tokens_B: Tensor,
    n: int = 0,
    *,
    out: LogProbs | None = None,
    impl: Impl = "auto",
) -> LogProbs:
    """Log probabilities of each row's token and of its `n` (up to 32) most likely tokens."""
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
        _launch(logits_BV, tokens_B, n, room)
    return room


def _launch(logits_BV: Tensor, tokens_B: Tensor, n: int, room: LogProbs) -> None:
    from cairn.kernels.sampling.logprobs_kernel import _likeliest_kernel, _logprobs_kernel

    batch, vocabulary = logits_BV.shape
    plan = Plan(**tuned("logprobs", _key(vocabulary, logits_BV.dtype, n), Plan()._asdict()))
    parts = plan.parts_of(vocabulary)
    sums = torch.empty((batch, parts, 2), device=logits_BV.device)
    top = torch.empty((batch, parts, n), device=logits_BV.device)
    ids = torch.empty((batch, parts, n), dtype=torch.int32, device=logits_BV.device)
    stride = logits_BV.stride(0)
    scan: Any = _logprobs_kernel
    scan[(batch * parts,)](
        logits_BV, sums, top, ids, stride, **constants(plan, vocabulary, n), num_warps=plan.warps
    )
    choose_n: Any = _likeliest_kernel
    choose_n[(batch,)](
        logits_BV, tokens_B, *room, sums, top, ids, stride,
        VOCABULARY=vocabulary, PARTS=parts, ROOM=1 << (max(1, parts * n) - 1).bit_length(), N=n, num_warps=1,
    )  # fmt: skip


def _rows(
    name: str, given: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, beside: Tensor
) -> Tensor:
    if given is None:
        return torch.empty(shape, dtype=dtype, device=beside.device)
    return check(name, given, dtypes=(dtype,), shape=shape, beside=beside, packed=True)


class Plan(NamedTuple):
    """Launch parameters; the tuned tables have the same fields."""

    lanes: int = 1024
    warps: int = 4
    stages: int = 4
    parts: int = 8  # programs that share a row, a power of two

    def parts_of(self, vocabulary: int) -> int:
        """Number of parts of a row; none is empty."""
        tiles = -(-vocabulary // self.lanes)
        return min(self.parts, 1 << (tiles.bit_length() - 1))


def constants(plan: Plan, vocabulary: int, n: int) -> dict[str, int]:
    parts = plan.parts_of(vocabulary)
    depth = 1 << (-(-vocabulary // (parts * plan.lanes)) - 1).bit_length()
    return dict(VOCABULARY=vocabulary, PARTS=parts, LANES=plan.lanes, DEPTH=depth, STAGES=plan.stages, N=n)  # fmt: skip


def _key(vocabulary: int, dtype: torch.dtype, n: int) -> str:
    return f"vocabulary={vocabulary},{short(dtype)},{'top' if n else 'token'}"


def cost(batch: int, vocabulary: int, bytes_each: int = 2) -> Cost:
    return Cost(flops=3.0 * batch * vocabulary, bytes=float(batch * vocabulary * bytes_each))
