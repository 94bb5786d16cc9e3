"""A second copy of a weight, laid out by columns, which some CPU libraries multiply several rows with faster.

With one row the order of checkpoints, row by row, is the right one, and with many the order does not matter: those are
left to the parameters. The numbers are the same up to rounding.
"""

from torch import Tensor

from cairn.models.cpu_half_precision import linear
from cairn.models.linear.form import PLAIN, AnyRows, Epilogue, finished

FEW = range(2, 193)  # rows for which the copy can be faster


class TransposedForm(AnyRows):
    def __init__(self, weight_NK: Tensor) -> None:
        self.weight_NK = weight_NK.detach().t().contiguous().t()

    @property
    def nbytes(self) -> int:
        return self.weight_NK.nbytes

    def covers(self, rows: int) -> bool:
        # Not `rows in FEW`: while torch records a step, sizes are tensors, which would be compared with each number.
        return FEW.start <= rows < FEW.stop

    def product(
        self, x_MK: Tensor, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Tensor:
        return finished(linear(x_MK, self.weight_NK, bias_N), None, epilogue)
