"""Rows sorted by expert, each group through its own matrix.

    x [M, K]  rows of expert 0 | rows of expert 1 | ...     ends [E]: where each group ends; a group may be empty

Three forms compute the same. bfloat16 on a Hopper GPU takes torch's grouped product, which reads `ends` on the device;
other types without gradients take every expert's product of all rows and keep those of the group, which is slow but
needs nothing from the host, so that a CUDA graph can hold it; and everything else splits the rows after one look at
`ends` from the host.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.models.cpu_half_precision import linear


def sort_by_expert(chosen_TN: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order that sorts all choices by expert, [T * N], and where each expert's group ends, [E] int32."""
    sorted_M, order_M = chosen_TN.flatten().sort(stable=True)
    experts_E = torch.arange(count, device=chosen_TN.device, dtype=sorted_M.dtype)
    return order_M, torch.searchsorted(sorted_M, experts_E, right=True, out_int32=True)


def grouped_product(x_MK: Tensor, weights_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Rows up to ends[0] times weights[0].T, from there up to ends[1] times weights[1].T, ..."""
    if has_grouped_mm(x_MK):
        return F.grouped_mm(x_MK, weights_ENK.transpose(-1, -2), offs=ends_E)
    if x_MK.is_cuda and not torch.is_grad_enabled():
        return masked_product(x_MK, weights_ENK, ends_E)
    return split_product(x_MK, weights_ENK, ends_E)


def grouped_gradient(dy_MN: Tensor, x_MK: Tensor, ends_E: Tensor) -> Tensor:
    """Weight gradient of `grouped_product`: dy.T x of each group, [E, N, K]; zeros for empty groups."""
    if has_grouped_mm(x_MK):
        return F.grouped_mm(dy_MN.t(), x_MK, offs=ends_E)
    ends = ends_E.tolist()
    groups = zip([0, *ends[:-1]], ends, strict=True)
    return torch.stack([dy_MN[a:b].t() @ x_MK[a:b] for a, b in groups])


def split_product(x_MK: Tensor, weights_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Compute one matmul for each expert with rows; copies `ends` to the host once."""
    ends = ends_E.tolist()
    groups = list(zip([0, *ends[:-1]], ends, strict=True))
    parts = [linear(x_MK[a:b], weights_ENK[e]) for e, (a, b) in enumerate(groups) if b > a]
    return torch.cat(parts) if parts else x_MK.new_empty(0, weights_ENK.shape[1])


def masked_product(x_MK: Tensor, weights_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """All rows through every expert, of which each row keeps one; nothing depends on what `ends` holds."""
    row_M1 = torch.arange(len(x_MK), device=x_MK.device)[:, None]
    y_MN = x_MK.new_zeros(len(x_MK), weights_ENK.shape[1])
    for expert in range(len(weights_ENK)):
        begin = ends_E[expert - 1] if expert else torch.zeros_like(ends_E[0])
        mine_M1 = (row_M1 >= begin) & (row_M1 < ends_E[expert])
        y_MN = torch.where(mine_M1, linear(x_MK, weights_ENK[expert]), y_MN)
    return y_MN


def has_grouped_mm(x: Tensor) -> bool:
    """Return whether torch's grouped matmul supports such rows."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(x.device) >= (9, 0)
