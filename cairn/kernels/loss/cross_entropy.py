"""Cross-entropy over vocabularies of 100,000 tokens and more, and its gradient.

    lse  = log(sum(exp(logits)))          loss = lse - (1 - s) * logits[target] - s * mean(logits) + z * lse^2
    gradient = softmax(logits) * (1 + 2 * z * lse) - (1 - s) * onehot(target) - s / V

s: label smoothing, z: weight of the z-loss. Rows whose target is `ignore_index` have no loss and no gradient. Other
targets must be in the vocabulary, which is not checked. Statistics are kept in float32, whatever the logits are.

    cross_entropy_(logits, targets)   loss and lse at once; the gradient is written OVER the logits
    cross_entropy(logits, targets)    a loss to call backward() on; backward writes the gradient over the logits

The logits are the largest tensor of a training step: at 8192 x 151936 they take 2.5 GB, and a copy as much again. In
place nothing is copied. Bytes moved: T*V written and T*V read, once in pieces that stay in the registers of a group of
programs (bf16, an even number of columns, no label smoothing), and twice otherwise.

Where the vocabulary is split over ranks each has the columns [start, start + V) of all logits. A `VocabShard` brings
the two collectives that join the ranks' maxima and sums, three numbers per token; who carries them out is injected.
"""

import functools
import os
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from cairn.kernels.arguments import apart, check, require, short
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.loss.cross_entropy_kernels import loop_kernel, pieces_kernel
from cairn.kernels.loss.cross_entropy_plans import (
    LOOP,
    PIECES,
    Plan,
)
from cairn.kernels.loss.cross_entropy_rule import (
    Losses,
    Rule,
    VocabShard,
    check_rule,
    cross_entropy_reference,
    join,
)
from cairn.kernels.norm.rows import multiprocessors
from cairn.kernels.tuned import tuned

Reduction = Literal["mean", "sum", "none"]


def cross_entropy_(
    logits_TV: Tensor,
    targets_T: Tensor,
    *,
    grad_scale: float | Tensor = 1.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    shard: VocabShard | None = None,
    impl: Impl = "auto",
) -> Losses:
    """Loss and log-sum-exp of each token; the logits become d(sum of grad_scale * loss) / d(logits).

    `grad_scale`: a number, or a float32 tensor with one number or one per token: 1 / (number of tokens) for a mean.
    """
    rule = Rule(ignore_index, z_loss, label_smoothing, shard)
    check_rule(logits_TV, targets_T, rule)
    apart("logits_TV", logits_TV)
    scale = _scale(grad_scale, logits_TV)
    if not _by_triton(logits_TV, targets_T, rule, impl):
        return _reference_(logits_TV, targets_T, scale, rule)
    plan = _config(logits_TV, rule)
    if logits_TV.shape[0] == 0:
        return _empty(logits_TV)
    if shard is not None:
        losses = forward(logits_TV, targets_T, rule)
        backward_(logits_TV, targets_T, losses.lse_T, scale, rule)
        return losses
    if plan.kernel == "pieces":
        return _in_pieces_(logits_TV, targets_T, scale, rule, plan)
    losses = _empty(logits_TV)
    _loop(logits_TV, targets_T, scale, losses, None, rule, forward=True, backward=True)
    return losses


def cross_entropy(
    logits_TV: Tensor,
    targets_T: Tensor,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    shard: VocabShard | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Differentiable cross-entropy: reads the logits once in forward; backward() overwrites them with their gradient.

    The mean is over the tokens that count, and 0 where none does.
    """
    rule = Rule(ignore_index, z_loss, label_smoothing, shard)
    check_rule(logits_TV, targets_T, rule)
    require(reduction in ("mean", "sum", "none"), "reduction", "mean, sum or none", reduction)
    if _by_triton(logits_TV, targets_T, rule, impl):
        loss_T = _CrossEntropy.apply(logits_TV, targets_T, rule)
    else:
        loss_T = cross_entropy_reference(logits_TV, targets_T, rule).loss_T
    if reduction == "none":
        return loss_T
    count = (targets_T != ignore_index).sum().clamp(min=1) if reduction == "mean" else 1
    return loss_T.sum() / count


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, rule: Rule) -> Tensor:  # type: ignore[override]
        losses = forward(logits_TV, targets_T, rule)
        ctx.save_for_backward(logits_TV, targets_T, losses.lse_T)
        ctx.rule = rule
        return losses.loss_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits_TV, targets_T, lse_T = ctx.saved_tensors
        scale_T = grad_T.float().expand(lse_T.shape).contiguous()
        backward_(logits_TV, targets_T, lse_T, scale_T, ctx.rule)
        torch.autograd.graph.increment_version(logits_TV)  # a second backward must not read them
        return logits_TV, None, None


def forward(logits: Tensor, targets: Tensor, rule: Rule) -> Losses:
    """Loss and log-sum-exp by the kernel; the logits stay as they are."""
    if rule.shard is None:
        losses = _empty(logits)
        _loop(logits, targets, None, losses, None, rule, forward=True, backward=False)
        return losses
    return join(statistics(logits, targets, rule), targets, rule, rule.shard)


def statistics(logits: Tensor, targets: Tensor, rule: Rule) -> Tensor:
    """Statistics [4, T] of a shard of the vocabulary; see `join`."""
    statistics_4T = logits.new_empty(4, logits.shape[0], dtype=torch.float32)
    _loop(logits, targets, None, None, statistics_4T, rule, forward=True, backward=False)
    return statistics_4T


def backward_(
    logits: Tensor,
    targets: Tensor,
    lse_T: Tensor,
    scale: Tensor,
    rule: Rule,
    weights_T: Tensor | None = None,
) -> None:
    """The gradient over the logits, from a log-sum-exp that is known: softmax * weights - onehot(target) * scale.

    Without `weights_T` they are scale * (1 + 2 * z * lse).
    """
    losses = Losses(lse_T, lse_T)
    _loop(
        logits, targets, scale, losses, None, rule, forward=False, backward=True, weights=weights_T
    )


def _loop(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor | None,
    losses: Losses | None,
    statistics: Tensor | None,
    rule: Rule,
    *,
    forward: bool,
    backward: bool,
    weights: Tensor | None = None,
) -> None:
    rows, columns = logits.shape
    if rows == 0:
        return
    block = min(8192, max(16, triton.next_power_of_2(columns)))
    # Where nothing has to be joined several programs may share a row.
    shares = 1 if forward else min(8, -(-columns // block))
    kernel: Any = loop_kernel
    kernel[rows, shares](
        *(logits, targets, scale, weights, losses and losses.loss_T, losses and losses.lse_T),
        statistics,
        *(rows, columns, logits.stride(0), 0 if scale is None or scale.numel() == 1 else 1),
        *(0 if rule.shard is None else rule.shard.start, rule.ignore_index, float(rule.z_loss)),
        *(float(rule.label_smoothing), float(rule.uniform(columns))),
        BLOCK=block,
        FORWARD=forward,
        BACKWARD=backward,
        SMOOTH=rule.label_smoothing > 0,
        STAGES=1,
        num_warps=max(1, min(8, block // 1024)),
    )


def _in_pieces_(logits: Tensor, targets: Tensor, scale: Tensor, rule: Rule, plan: Plan) -> Losses:
    rows, columns = logits.shape
    pieces = plan.pieces(columns)
    losses = _empty(logits)  # the kernel takes both as one
    groups = min(rows, max(1, _together(plan, logits.device) // pieces))
    number = (rows + groups) * pieces if pieces > 1 else 1
    records = torch.zeros(number, dtype=torch.int64, device=logits.device)
    words_TV = logits.detach().view(torch.int32)
    together = {"launch_cooperative_grid": True} if pieces > 1 else {}
    compiled = {} if _interpreted() else {"maxnreg": plan.maxnreg, **together}
    kernel: Any = pieces_kernel
    kernel[(groups * pieces,)](
        *(words_TV, logits, targets, scale, records, losses.loss_T, rows, words_TV.shape[1]),
        *(
            words_TV.stride(0),
            0 if scale.numel() == 1 else 1,
            rule.ignore_index,
            float(rule.z_loss),
        ),
        **plan.constants(columns),
        num_warps=plan.warps,
        **compiled,
    )
    return losses


@functools.lru_cache(maxsize=64)
def _together(plan: Plan, device: torch.device) -> int:
    """Number of programs that are resident at once; a cooperative launch needs all of them."""
    per_sm = plan.per_sm
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
        per_sm = max(1, min(per_sm, room // plan.shared_bytes))
    return per_sm * multiprocessors(device)


def _reference_(logits: Tensor, targets: Tensor, scale: Tensor, rule: Rule) -> Losses:
    wide = logits.detach().clone().requires_grad_()
    with torch.enable_grad():
        losses = cross_entropy_reference(wide, targets, rule)
    [gradient] = torch.autograd.grad(losses.loss_T.sum(), wide)
    logits.copy_(gradient * scale.reshape(-1, 1))
    return Losses(losses.loss_T.detach(), losses.lse_T.detach())


def _by_triton(logits: Tensor, targets: Tensor, rule: Rule, impl: Impl) -> bool:
    wide = "it computes in float32, and the logits are float64"
    obstacle = wide if logits.dtype == torch.float64 else needs_cuda(logits, targets)
    return choose("cross_entropy", impl, {"triton": obstacle, "reference": None}).impl == "triton"


def _scale(given: float | Tensor, logits: Tensor) -> Tensor:
    if not isinstance(given, Tensor):
        return torch.full((1,), given, dtype=torch.float32, device=logits.device)
    check("grad_scale", given, dtypes=(torch.float32,), beside=logits, packed=True)
    fits = given.numel() in (1, logits.shape[0])
    require(fits, "grad_scale", f"1 or {logits.shape[0]} numbers", list(given.shape))
    return given


def _empty(logits: Tensor) -> Losses:
    both = logits.new_empty(2, logits.shape[0], dtype=torch.float32)
    return Losses(both[0], both[1])


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _config(logits: Tensor, rule: Rule) -> Plan:
    columns = logits.shape[1]
    if rule.label_smoothing or rule.shard is not None:
        return LOOP
    # In pieces, logits are read two at a time.
    in_words = logits.dtype == torch.bfloat16 and columns % 2 == logits.stride(0) % 2 == 0
    in_words = in_words and logits.data_ptr() % 4 == 0
    default = PIECES if in_words else LOOP
    if _interpreted():  # one program after another cannot wait for each other
        return default if in_words and default.pieces(columns) == 1 else LOOP
    plan = Plan(**tuned("cross_entropy", _key(columns, logits.dtype), default._asdict()))
    return plan if plan.kernel == "loop" or in_words else LOOP


def _key(columns: int, dtype: torch.dtype) -> str:
    return f"columns={columns},{short(dtype)}"


def cost(rows: int, columns: int, itemsize: int = 2) -> Cost:
    """Forward and backward in place: every logit is read once and written once."""
    return Cost(8.0 * rows * columns, 2.0 * rows * columns * itemsize)
