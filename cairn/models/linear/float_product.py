"""The product with a weight in floating point: by torch with gradients, or by a GPU kernel (`gpu_product`).

The kernels are imported when the first of them runs, so that a model on a CPU does without Triton.
"""

from torch import Tensor

from cairn.models.cpu_half_precision import linear
from cairn.models.linear.form import Epilogue, Product, finished


def float_product(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, epilogue: Epilogue) -> Product:
    if epilogue.kernels is None:
        return finished(linear(x_MK, w_NK, bias_N), None, epilogue)
    from cairn.models.linear.gpu_product import gpu_product

    return gpu_product(x_MK, w_NK.data, bias_N, epilogue, epilogue.kernels)
