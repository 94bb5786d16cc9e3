"""The last linear layer and its cross-entropy as one operation that never holds all logits.

    for each chunk of tokens:   logits = x @ weight.T              cuBLAS
                                logits -> loss, gradient           in place (cross_entropy)
                                grad_x = logits @ weight           cuBLAS
                                grad_weight += logits.T @ x        cuBLAS

8192 tokens over a vocabulary of 131072 would take 2 GiB of logits in bfloat16, 4 in float32, and their gradients as
much again; a chunk takes less than 1 GiB, whatever the number of tokens (enough rows to fill the chip, and few sums of
grad_weight). Everything is computed in the forward pass, because the gradient of a sum is known there up to one factor;
backward multiplies with that factor, and touches nothing if it is 1. So there is no per-token gradient to pass in:
weights per token are an argument, and a graph can be walked backward only once.

Logits and their gradient are rounded to the type of x, as they would be in between separate operations; products
are summed in float32. grad_weight is summed over several chunks in `accumulate`: float32 by default, for one rounding
in place of one per chunk, at 4 bytes per weight while the loss is computed and 2 more at its end.

A `token_rule` makes another loss of each token's log-probability (`token_rule.py`). The logits of a chunk are then read
twice, once for the log-probabilities and once for the gradient; the three products stay the same.
FLOPs: 6 * T * D * V, of which 4 are the gradients. Bytes moved: 2*T*V for each of product, loss and two products.
"""

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, INTEGERS, as_rows, check, require, short
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.loss import cross_entropy as kernel
from cairn.kernels.loss.cross_entropy_rule import (
    Rule,
    VocabShard,
    check_rule,
    cross_entropy_reference,
)
from cairn.kernels.loss.token_rule import TokenRule, applied, with_slope
from cairn.kernels.norm.rows import blocks, launch, multiprocessors
from cairn.kernels.tuned import tuned

LOGITS_MIB = 1000  # of a chunk, unless a table says otherwise
CHUNK_ROWS = 128  # chunks are multiples of this, the height of a tile of cuBLAS


class LinearLosses(NamedTuple):
    loss: Tensor  # a scalar, the one to call backward() on
    loss_T: Tensor  # of each token, float32, without weights; for the log
    lse_T: Tensor


class LossOptions(NamedTuple):
    rule: Rule
    chunk: int  # tokens
    accumulate: torch.dtype
    token_rule: TokenRule | None = None


def linear_cross_entropy_reference(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    scale_T: Tensor,
    rule: Rule,
    token_rule: TokenRule | None = None,
) -> LinearLosses:
    """Reference in float32 or float64 with all logits at once; autograd gives its gradient."""
    wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    terms = rule if token_rule is None else rule._replace(z_loss=0.0)
    losses = cross_entropy_reference(x_TD.to(wide) @ weight_VD.to(wide).T, targets_T, terms)
    if token_rule is not None:
        logp_T, counts_T = -losses.loss_T, targets_T != rule.ignore_index
        found = applied(token_rule, logp_T, counts_T, slice(0, len(targets_T)))
        loss_T = with_slope(logp_T, *found) + rule.z_loss * losses.lse_T.square()
        losses = losses._replace(loss_T=loss_T)
    return LinearLosses((losses.loss_T * scale_T).sum(), *losses)


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    weights_T: Tensor | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk_tokens: int | None = None,
    accumulate: torch.dtype | None = None,
    shard: VocabShard | None = None,
    token_rule: TokenRule | None = None,
    impl: Impl = "auto",
) -> LinearLosses:
    """Loss of the next tokens from the last hidden states; see the head of this file.

    A mean is over the tokens that count (0 where none does), before `weights_T` (float32) multiply each. With a
    `shard` the weight is this rank's rows of the vocabulary and x is the same everywhere: let it come through
    `Shards.enter`, which sums the ranks' gradients of x. A `token_rule` takes the place of -log p; z_loss is added to
    what it makes, and there is no label smoothing.
    """
    check("x_TD", x_TD, dtypes=(*FLOATS, torch.float64))
    x = as_rows("x_TD", x_TD)
    check("weight_VD", weight_VD, dtypes=(x.dtype,), shape=(None, x.shape[1]), beside=x)
    check("targets_T", targets_T, dtypes=INTEGERS, shape=x_TD.shape[:-1], beside=x, packed=True)
    require(weight_VD.shape[0] > 0, "weight_VD", "at least one row", tuple(weight_VD.shape))
    fine = chunk_tokens is None or chunk_tokens > 0
    require(fine, "chunk_tokens", "at least 1", chunk_tokens)
    rule = Rule(ignore_index, z_loss, label_smoothing, shard)
    check_rule(x[:, :1], targets_T.reshape(-1), rule)
    require(reduction in ("mean", "sum"), "reduction", "mean or sum", reduction)
    fine = accumulate in (None, x.dtype, torch.float32)
    require(fine, "accumulate", f"{short(x.dtype)} or float32", accumulate)
    fine = token_rule is None or not label_smoothing
    require(fine, "token_rule", "no label smoothing beside it", label_smoothing)
    targets = targets_T.reshape(-1)
    scale = _scale(targets, reduction, weights_T, rule)
    wide = "it computes in float32, and x is float64"
    obstacle = wide if x.dtype == torch.float64 else needs_cuda(x, weight_VD, targets)
    offers = {"triton": obstacle, "reference": None}
    if choose("linear_cross_entropy", impl, offers).impl == "reference":
        return linear_cross_entropy_reference(x, weight_VD, targets, scale, rule, token_rule)
    chunk = chunk_tokens or _chunk(x.shape[0], weight_VD.shape[0], x.dtype)
    default = torch.float32 if x.shape[0] > chunk else x.dtype
    work = LossOptions(rule, chunk, accumulate or default, token_rule)
    return LinearLosses(*_LinearCrossEntropy.apply(x, weight_VD, targets, scale, work))


def _scale(targets_T: Tensor, reduction: str, weights_T: Tensor | None, rule: Rule) -> Tensor:
    """Factor of each token's loss, [1] or [T], computed without a copy to the host."""
    if reduction == "mean":
        count = (targets_T != rule.ignore_index).sum().clamp(min=1)
        scale = count.reciprocal().float().reshape(1)
    else:
        scale = torch.ones(1, device=targets_T.device)
    if weights_T is None:
        return scale
    check("weights_T", weights_T, dtypes=(torch.float32,), beside=targets_T)
    fits = weights_T.numel() == targets_T.numel()
    require(fits, "weights_T", f"{targets_T.numel()} numbers", weights_T.numel())
    return weights_T.detach().reshape(-1) * scale


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        scale: Tensor,
        work: LossOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        tokens, vocabulary = x_TD.shape[0], weight_VD.shape[0]
        losses_2T = x_TD.new_empty(2, tokens, dtype=torch.float32)
        grad_x = torch.empty_like(x_TD) if wants_x else None
        grad_weight = torch.empty_like(weight_VD, dtype=work.accumulate) if wants_weight else None
        if grad_weight is not None and tokens == 0:
            grad_weight.zero_()
        logits_CV = room_CV = x_TD.new_empty(min(work.chunk, tokens), vocabulary)
        for start in range(0, tokens, work.chunk):
            part = slice(start, min(start + work.chunk, tokens))
            logits_CV = room_CV[: part.stop - start]
            torch.mm(x_TD[part], weight_VD.T, out=logits_CV)
            factor = scale if scale.numel() == 1 else scale[part]
            with_gradient = wants_x or wants_weight
            losses_2T[:, part] = _losses(
                logits_CV, targets_T[part], factor, work, with_gradient, part
            )
            if grad_x is not None:
                torch.mm(logits_CV, weight_VD, out=grad_x[part])
            if grad_weight is not None:
                _add_product(grad_weight, logits_CV.T, x_TD[part], is_first=start == 0)
        del room_CV, logits_CV  # not there while the sum is rounded
        ctx.gradients = (
            grad_x,
            grad_weight if grad_weight is None else grad_weight.to(weight_VD.dtype),
        )
        loss_T, lse_T = losses_2T
        ctx.mark_non_differentiable(loss_T, lse_T)
        return (loss_T * scale).sum(), loss_T, lse_T

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.gradients is None:
            raise RuntimeError("linear_cross_entropy: its gradients are gone after one backward()")
        for part in ctx.gradients:
            if part is not None:
                _multiply(part, grad)
        grads, ctx.gradients = ctx.gradients, None
        return (*grads, None, None, None)


@triton.jit(do_not_specialize=["count"])
def _multiply_kernel(values, factor, count, BLOCK: tl.constexpr):
    """values *= factor. A factor of 1, which is what the backward() of a loss begins with, is looked at and no more."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        for block in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
            at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < count
            product = tl.load(values + at, mask=inside, other=0.0).to(tl.float32) * by
            tl.store(values + at, product.to(values.dtype.element_ty), mask=inside)


def _multiply(values: Tensor, factor: Tensor) -> None:
    count = values.numel()
    programs = min(blocks(count, _BLOCK), 8 * multiprocessors(values.device))
    if not count:
        return
    launch(_multiply_kernel, programs, values, factor, count, BLOCK=_BLOCK, num_warps=4)


_BLOCK = 2048


def _losses(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    work: LossOptions,
    with_gradient: bool,
    part: slice,
) -> Tensor:
    """Loss and log-sum-exp [2, C]; with their gradient in place of the logits."""
    rule = work.rule
    if work.token_rule is not None:
        return _losses_by_rule(logits, targets, scale, rule, work.token_rule, with_gradient, part)
    if not with_gradient:
        return torch.stack(kernel.forward(logits, targets, rule))
    losses = kernel.cross_entropy_(
        logits,
        targets,
        grad_scale=scale,
        ignore_index=rule.ignore_index,
        z_loss=rule.z_loss,
        label_smoothing=rule.label_smoothing,
        shard=rule.shard,
        impl="triton",
    )
    return torch.stack(losses)


def _losses_by_rule(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    rule: Rule,
    token_rule: TokenRule,
    with_gradient: bool,
    part: slice,
) -> Tensor:
    """The same for another loss than -log p: one pass for the log-probabilities, one for the gradient."""
    surprise_C, lse_C = kernel.forward(logits, targets, rule._replace(z_loss=0.0))
    loss_C, slope_C = applied(token_rule, -surprise_C, targets != rule.ignore_index, part)
    if with_gradient:
        of_target_C = (-slope_C * scale).float()
        of_softmax_C = of_target_C + 2.0 * rule.z_loss * lse_C * scale
        kernel.backward_(logits, targets, lse_C, of_target_C, rule, of_softmax_C.contiguous())
    return torch.stack((loss_C + rule.z_loss * lse_C.square(), lse_C))


def _add_product(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """total += a @ b, summed in float32 inside; the first one does not look at what was there."""
    beta = 0 if is_first else 1
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        product = a.to(total.dtype) @ b.to(total.dtype)
        total.copy_(product if is_first else total + product)


def _chunk(tokens: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Equal chunks whose logits stay below a limit."""
    mib = tuned("linear_cross_entropy", _key(vocabulary, dtype), {"logits_mib": LOGITS_MIB})[
        "logits_mib"
    ]
    most = int(mib * 2**20) // (vocabulary * dtype.itemsize) // CHUNK_ROWS * CHUNK_ROWS
    most = max(CHUNK_ROWS, most)
    chunks = max(1, -(-tokens // most))
    return -(-tokens // (chunks * CHUNK_ROWS)) * CHUNK_ROWS or CHUNK_ROWS


def _key(vocabulary: int, dtype: torch.dtype) -> str:
    return f"vocabulary={vocabulary},{short(dtype)}"


def cost(tokens: int, width: int, vocabulary: int, itemsize: int = 2) -> Cost:
    """Operands read and gradients written once; logits that stay on the chip would cost nothing."""
    moved = 2.0 * (tokens * width + vocabulary * width) * itemsize
    return Cost(6.0 * tokens * width * vocabulary, moved)
