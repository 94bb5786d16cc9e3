"""Activations in two digits of 8 bits, and the sum of what is multiplied with them, by the compiled kernels.

    x [M, K] -split-> [2M, K]: whole steps, then what is left over -product of 8 bits-> [2M, N] -join-> y [M, N]

One call before the product and one behind it, in place of a dozen of torch's: for a small model and few rows those take
longer than the product itself. Knows nothing about the product.
"""

import ctypes

from torch import Tensor

from cairn.kernels.cpu.compiled import library

MOST_OUTPUTS = 1 << 14  # of a row that is joined here, on one thread


class Digits:
    """Digits of the input of a matrix. Outlier columns are multiplied with `apart_ON` in float32."""

    def __init__(
        self,
        inlier_K: Tensor,
        pinned_K: Tensor,
        outliers_O: Tensor,
        apart_ON: Tensor,
        most: int,
        lower: float,
    ) -> None:
        """`pinned_K`: added to whole steps, where inliers are 0. `most`, `lower`: of either digit, in steps."""
        self._kept = inlier_K, pinned_K, outliers_O, apart_ON  # whose addresses are used
        self._split, self._join = library().cairn_digits, library().cairn_join_digits
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in self._kept]
        self._inlier, self._pinned, self._outliers, self._apart = addresses
        self._most, self._lower = ctypes.c_float(most), ctypes.c_float(lower)
        self.joins = apart_ON.shape[1] <= MOST_OUTPUTS

    def split(self, x_MK: Tensor) -> tuple[Tensor, Tensor]:
        """The digits, and the size of a step of each row [M, 1]. x is contiguous."""
        rows, columns = x_MK.shape
        digits_2MK, step_M1 = x_MK.new_empty(2 * rows, columns), x_MK.new_empty(rows, 1)
        self._split(
            *(ctypes.c_void_p(x_MK.data_ptr()), self._inlier, self._pinned, rows, columns),
            *(self._most, self._lower),
            *(ctypes.c_void_p(digits_2MK.data_ptr()), ctypes.c_void_p(step_M1.data_ptr())),
        )
        return digits_2MK, step_M1

    def join(self, products_2MN: Tensor, step_M1: Tensor, x_MK: Tensor) -> Tensor:
        """y, where the first half of the products lay."""
        rows, columns = x_MK.shape
        self._join(
            *(ctypes.c_void_p(products_2MN.data_ptr()), ctypes.c_void_p(step_M1.data_ptr())),
            *(ctypes.c_void_p(x_MK.data_ptr()), columns, self._outliers, len(self._kept[2])),
            *(self._apart, rows, products_2MN.shape[1], self._lower),
        )
        return products_2MN[:rows]
