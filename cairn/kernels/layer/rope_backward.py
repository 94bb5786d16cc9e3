"""The gradients of `rope`: from dq, dk, dv back to the fused projection, and to the weights of the norms.

Turning back is turning by the negative angle; then follows what rmsnorm_backward does, for each head of C columns.
One launch: a program takes some tokens and walks over their heads, so that angles are loaded once for all of them; v
is copied. Each program sums up its weight gradients and writes them once; the sums are added in a fixed order. Bytes
moved: gradients of all heads in and out, and with norms q and k once more.

Attention leaves dq, dk and dv side by side in one tensor, as the projection has them. Who may overwrite it (`in_place`)
turns the heads of q and k where they lie, and moves nothing for those of v.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, INTEGERS, check, require, short
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import blocks, launch, multiprocessors, sum_parts, width
from cairn.kernels.tuned import tuned

DEFAULT = {"rows": 16, "warps": 4, "per_sm": 4}
Gradients = tuple[Tensor, Tensor | None, Tensor | None]


class Heads(NamedTuple):
    """Layout of a row of the fused projection: q, k and v heads of one size, and the norms of q and k."""

    q: int
    kv: int
    q_weight: Tensor | None = None  # [C]; None: no norm
    k_weight: Tensor | None = None
    eps: float = 1e-6
    plus_one: bool = False

    def check(self, qkv: Tensor) -> int:
        """The size of a head, if everything fits."""
        check("qkv", qkv, dtypes=FLOATS, shape=(None, None))
        require(qkv.stride(1) == 1, "qkv", "stride 1 in the last dimension", qkv.stride())
        number = self.q + 2 * self.kv
        fits = self.q > 0 and self.kv > 0 and qkv.shape[1] % (2 * number) == 0
        require(fits, "qkv", f"{number} heads of an even size", f"{qkv.shape[1]} columns")
        size = qkv.shape[1] // number
        require(
            (self.q_weight is None) == (self.k_weight is None),
            "k_weight",
            "one with q_weight",
            None,
        )
        for name, weight in (("q_weight", self.q_weight), ("k_weight", self.k_weight)):
            if weight is not None:
                check(name, weight, dtypes=FLOATS, shape=(size,), beside=qkv, packed=True)
        return size


def check_rope(qkv: Tensor, heads: Heads, table: Tensor | None, positions: Tensor | None) -> int:
    """Check the arguments of both directions and return the head size."""
    size, tokens = heads.check(qkv), qkv.shape[0]
    if table is not None:
        check("table", table, dtypes=FLOATS, shape=(None, size), beside=qkv)
        require(table.stride(1) == 1, "table", "stride 1 in the last dimension", table.stride())
        needed = tokens if positions is None else min(tokens, 1)
        if table.shape[0] < needed:
            require(False, "table", f"at least {needed} rows", tuple(table.shape))
    if positions is not None:
        check("positions", positions, dtypes=INTEGERS, shape=(tokens,), beside=qkv, packed=True)
    return size


def rope_backward_reference(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv_TE: Tensor,
    heads: Heads,
    table: Tensor | None,
    positions: Tensor | None,
) -> Gradients:
    """Reference in float32 (float64 for a float64 qkv), rounded at the end only."""
    wide = torch.float64 if qkv_TE.dtype == torch.float64 else torch.float32
    packed = qkv_TE.unflatten(-1, (heads.q + 2 * heads.kv, -1)).to(wide)
    parts = packed.split([heads.q, heads.kv, heads.kv], dim=1)
    found, weights = [], [heads.q_weight, heads.k_weight, None]
    for part, weight in enumerate(weights):
        d, x = grads[part].to(wide), parts[part]
        if table is not None and part < 2:
            angles = table[: len(x)] if positions is None else table[positions.long()]
            cos, sin = angles[:, None].to(wide).chunk(2, dim=-1)
            low, high = d.chunk(2, dim=-1)
            d = torch.cat((low * cos + high * sin, high * cos - low * sin), dim=-1)
        if weight is not None:
            r = torch.rsqrt(x.square().mean(-1, keepdim=True) + heads.eps)
            n, dn = x * r, d * (weight.to(wide) + heads.plus_one)
            weights[part] = (d * n).sum((0, 1)).to(weight.dtype)
            d = (dn - n * (dn * n).mean(-1, keepdim=True)) * r
        found.append(d)
    return torch.cat(found, dim=1).flatten(1).to(qkv_TE.dtype), weights[0], weights[1]


@triton.jit
def _halves(at, mask, C: tl.constexpr):
    return tl.load(at, mask=mask, other=0.0), tl.load(at + C // 2, mask=mask, other=0.0)


@triton.jit
def _walk(
    grad, x, out, weight, parts, table, positions, tokens, eps, grad_token, x_token, out_token,
    table_row, HEADS: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """Some tokens after others, and of each its heads: the next one is on its way while one is rotated."""
    i = tl.arange(0, HALF)[None, :]
    inside = i < C // 2
    sum_low = tl.zeros([ROWS, HALF], tl.float32)
    sum_high = tl.zeros([ROWS, HALF], tl.float32)
    w_low, w_high = 1.0, 1.0
    if weight is not None:
        w_low, w_high = _halves(weight + i, inside, C)
        w_low, w_high = w_low.to(tl.float32), w_high.to(tl.float32)
        w_low += 1.0 if PLUS_ONE else 0.0
        w_high += 1.0 if PLUS_ONE else 0.0
    for start in tl.range(tl.program_id(0) * ROWS, tokens, tl.num_programs(0) * ROWS, num_stages=1):
        row = start + tl.arange(0, ROWS)[:, None]
        token, mask = row.to(tl.int64), (row < tokens) & inside
        grad_at, x_at = grad + token * grad_token + i, x + token * x_token + i
        out_at = out + token * out_token + i
        next_low, next_high = _halves(grad_at, mask, C)
        next_x_low, next_x_high = next_low, next_high
        if weight is not None:
            next_x_low, next_x_high = _halves(x_at, mask, C)
        cos, sin = 1.0, 0.0
        if table is not None:
            position = token
            if positions is not None:
                position = tl.load(positions + row, mask=row < tokens, other=0).to(tl.int64)
            cos, sin = _halves(table + position * table_row + i, mask, C)
            cos, sin = cos.to(tl.float32), sin.to(tl.float32)
        for head in tl.range(HEADS, num_stages=1):
            low, high = next_low.to(tl.float32), next_high.to(tl.float32)
            x_low, x_high = next_x_low.to(tl.float32), next_x_high.to(tl.float32)
            more = mask & (head + 1 < HEADS)
            next_low, next_high = _halves(grad_at + (head + 1) * C, more, C)
            if weight is not None:
                next_x_low, next_x_high = _halves(x_at + (head + 1) * C, more, C)
            if table is not None:
                low, high = low * cos + high * sin, high * cos - low * sin
            if weight is not None:
                r = tl.rsqrt(tl.sum(x_low * x_low + x_high * x_high, axis=1)[:, None] / C + eps)
                x_low, x_high = x_low * r, x_high * r
                sum_low += low * x_low
                sum_high += high * x_high
                low, high = low * w_low, high * w_high
                along = tl.sum(low * x_low + high * x_high, axis=1)[:, None] / C
                low, high = (low - x_low * along) * r, (high - x_high * along) * r
            tl.store(out_at + head * C, low.to(out.dtype.element_ty), mask=mask)
            tl.store(out_at + head * C + C // 2, high.to(out.dtype.element_ty), mask=mask)
    if weight is not None:
        tl.store(parts + i, tl.sum(sum_low, axis=0)[None, :], mask=inside)
        tl.store(parts + i + C // 2, tl.sum(sum_high, axis=0)[None, :], mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _rope_backward_kernel(
    dq, dk, dv, qkv, table, positions, q_weight, k_weight, dqkv, parts, tokens, eps,
    dq_token, dk_token, dv_token, qkv_token, dqkv_token, table_row,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    WITH_V: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """parts [programs, 2, C]: what a program adds to the gradients of q's and of k's weight."""
    sums = parts + tl.program_id(0) * (2 * C)
    _walk(
        dq, qkv, dqkv, q_weight, sums, table, positions, tokens, eps, dq_token, qkv_token,
        dqkv_token, table_row, H, C, HALF, ROWS, PLUS_ONE,
    )  # fmt: skip
    _walk(
        dk, qkv + H * C, dqkv + H * C, k_weight, sums + C, table, positions, tokens, eps, dk_token,
        qkv_token, dqkv_token, table_row, K, C, HALF, ROWS, PLUS_ONE,
    )  # fmt: skip
    if WITH_V:
        _walk(
            dv, qkv, dqkv + (H + K) * C, None, sums, None, None, tokens, eps, dv_token, qkv_token,
            dqkv_token, table_row, K, C, HALF, ROWS, PLUS_ONE,
        )  # fmt: skip


def rope_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    heads: Heads,
    table: Tensor | None,
    positions: Tensor | None = None,
    impl: Impl = "auto",
    in_place: bool = False,
) -> Gradients:
    """Gradients of qkv and of the norms' weights (None without norms).

    `in_place`: dq, dk and dv are the caller's to give away; where they share a tensor, it is overwritten and returned.
    """
    size = check_rope(qkv, heads, table, positions)
    tokens = qkv.shape[0]
    for name, grad, count in (("dq", dq, heads.q), ("dk", dk, heads.kv), ("dv", dv, heads.kv)):
        check(name, grad, dtypes=FLOATS, shape=(tokens, count, size), beside=qkv)
        packed = not grad.numel() or grad.stride()[1:] == (size, 1)
        require(packed, name, "heads side by side", f"strides {grad.stride()}")
    chosen = choose("rope_backward", impl, {"triton": needs_cuda(qkv), "reference": None})
    if chosen.impl == "reference":
        return rope_backward_reference((dq, dk, dv), qkv, heads, table, positions)
    joined = _joined(dq, dk, dv) if in_place else None
    return _launch((dq, dk, dv), qkv, heads, table, positions, size, joined)


def _joined(dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor | None:
    """All three as one tensor [T, E], if they lie side by side in its rows."""
    tokens, (row, size, one) = len(dq), dq.stride()
    columns = (dq.shape[1] + 2 * dk.shape[1]) * size
    apart = [dk.data_ptr() - dq.data_ptr(), dv.data_ptr() - dk.data_ptr()]
    wanted = [dq.shape[1] * size * dq.itemsize, dk.shape[1] * size * dq.itemsize]
    same = all(part.stride() == dq.stride() and part.dtype == dq.dtype for part in (dk, dv))
    if not tokens or not same or apart != wanted or row < columns:
        return None
    return dq.as_strided((tokens, columns), (row, one))


def heads_side_by_side(grad_THC: Tensor) -> Tensor:
    """Return the gradient with contiguous heads; tokens may be strided, as when dk and dv share a tensor."""
    tokens_apart = grad_THC.stride()[1:] == (grad_THC.shape[2], 1)
    return grad_THC if tokens_apart else grad_THC.contiguous()


def _launch(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    heads: Heads,
    table: Tensor | None,
    positions: Tensor | None,
    size: int,
    joined: Tensor | None = None,
) -> Gradients:
    """`joined`: where the gradients lie side by side and where that of qkv shall be."""
    how = tuned("rope_backward", f"size={size},{short(qkv.dtype)}", DEFAULT)
    tokens = qkv.shape[0]
    most = how["per_sm"] * multiprocessors(qkv.device)
    programs = max(1, min(blocks(tokens, how["rows"]), most))
    dqkv = joined
    if dqkv is None:
        dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    parts = torch.empty(programs, 2 * size, dtype=torch.float32, device=qkv.device)
    launch(
        _rope_backward_kernel, programs,
        *grads, qkv, table, positions, heads.q_weight, heads.k_weight, dqkv, parts, tokens,
        heads.eps, *(grad.stride(0) for grad in grads), qkv.stride(0), dqkv.stride(0),
        0 if table is None else table.stride(0),
        H=heads.q, K=heads.kv, C=size, HALF=width(size // 2), ROWS=how["rows"],
        WITH_V=joined is None, PLUS_ONE=heads.plus_one, num_warps=how["warps"],
    )  # fmt: skip
    if heads.q_weight is None or heads.k_weight is None:
        return dqkv, None, None
    types = heads.q_weight.dtype, heads.k_weight.dtype
    summed = types[0] if types[0] == types[1] else torch.float32  # each is rounded once
    of_q, of_k = sum_parts(parts, summed).split(size)
    return dqkv, of_q.to(types[0]), of_k.to(types[1])


def cost(tokens: int, heads: Heads, size: int, normed: bool, element_bytes: int = 2) -> Cost:
    again = heads.q + heads.kv if normed else 0
    elements = tokens * size * (2 * (heads.q + 2 * heads.kv) + again)
    return Cost(6 * elements, elements * element_bytes)
