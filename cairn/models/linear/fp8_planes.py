"""A float8 matrix as a checkpoint stores it, with one scale for each row or for all of it: multiplied as `Fp8Rows`."""

from torch import Tensor

from cairn.kernels.quantize.quantize import Quantized
from cairn.models.linear.fp8_rows import Fp8Rows
from cairn.models.quantized.planes import Planes


class Fp8Planes(Fp8Rows):
    def __init__(self, planes: Planes) -> None:
        rows = planes.shape[0]
        scale_N1: Tensor = planes.scales.repeat_interleave(planes.block_rows, 0)[:rows]
        self.quantized = Quantized(planes.levels_NK.contiguous(), scale_N1.float().contiguous())

    @staticmethod
    def obstacle(planes: Planes) -> str | None:  # pyrefly: ignore[bad-override]
        """Why these planes have no such form, or None."""
        columns = planes.shape[1]
        if planes.kind != "fp8" or planes.shifts is not None or planes.order_K is not None:
            return f"{planes.kind} levels, shifts or another order of columns"
        if planes.group < columns:
            return f"a scale for each {planes.group} of {columns} columns"
        return f"rows of {columns} bytes" if columns % 16 else None
