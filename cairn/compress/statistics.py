"""Statistics of the inputs of a matrix over the calibration text."""

import torch
from torch import Tensor

SAMPLE = 512  # rows that are kept as they are
BLOCK = 256  # columns of x x^T that are summed up together on a CPU
LONGEST = 3.0  # times the median length of a row, in sums of x x^T and in maxima


def bounded_rows(x_MK: Tensor) -> Tensor:
    """Rows that are far longer than most, shortened: the square of one first token would outweigh all other tokens."""
    length_M1 = x_MK.float().norm(dim=1, keepdim=True)
    most = LONGEST * length_M1.median()
    return (x_MK * (most / length_M1.clamp(min=1e-12)).clamp(max=1)).to(x_MK.dtype)


class InputStatistics:
    """Sums over all rows x of an input [M, K], and some of the rows themselves."""

    def __init__(self, columns: int, device: torch.device, batches: int, hessian: bool) -> None:
        """`batches`: how often `add` will be called; `hessian`: whether sums of x x^T are wanted."""
        self.rows = 0
        self.square_KK: Tensor | None = None
        if hessian:
            self.square_KK = torch.zeros(columns, columns, device=device)
        self.sum_abs_K = torch.zeros(columns, device=device)
        self.sum_squares_K = torch.zeros(columns, device=device)
        self.max_abs_K = torch.zeros(columns, device=device)  # of bounded rows
        self._kept: list[Tensor] = []
        self._per_batch = -(-SAMPLE // max(batches, 1))

    def add(self, x_MK: Tensor) -> None:
        if not len(x_MK):
            return
        self.rows += len(x_MK)
        wide = x_MK.float()
        size = wide.abs()
        self.sum_abs_K += size.sum(0)
        self.sum_squares_K += wide.square().sum(0)
        bounded_MK = bounded_rows(x_MK)
        self.max_abs_K = torch.maximum(self.max_abs_K, bounded_MK.float().abs().amax(0))
        if self.square_KK is not None:
            self._add_square(bounded_MK, bounded_MK.float())
        step = max(len(x_MK) // self._per_batch, 1)
        self._kept.append(x_MK[::step][: self._per_batch].clone())

    def _add_square(self, x_MK: Tensor, wide: Tensor) -> None:
        assert self.square_KK is not None
        if x_MK.is_cuda and x_MK.dtype != torch.float32:
            # Products of 16-bit numbers are exact in float32, and tensor cores sum in float32.
            self.square_KK += torch.mm(x_MK.t(), x_MK, out_dtype=torch.float32)
        elif x_MK.is_cuda:
            self.square_KK.addmm_(wide.t(), wide)
        else:  # where the product takes long, only up to its diagonal: it is symmetric
            for first in range(0, wide.shape[1], BLOCK):
                last = first + BLOCK
                self.square_KK[first:last, :last].addmm_(wide[:, first:last].t(), wide[:, :last])

    @property
    def sample_MK(self) -> Tensor:
        return torch.cat(self._kept)[:SAMPLE]

    @property
    def hessian_KK(self) -> Tensor:
        """2 / n * sum of x x^T: the second derivative of the mean square error of a row of the output."""
        assert self.square_KK is not None
        lower_KK = self.square_KK.tril()
        return (lower_KK + lower_KK.tril(-1).t()) * (2.0 / max(self.rows, 1))

    @property
    def mean_abs_K(self) -> Tensor:
        return self.sum_abs_K / max(self.rows, 1)

    @property
    def norm_K(self) -> Tensor:
        """The length of each column over all rows."""
        return self.sum_squares_K.sqrt()
