"""A weight matrix in some form, and what a product with it does on the way out.

    y = activation(x @ weight.T + bias)        or, onto a residual:  residual + x @ weight.T + bias

A form owns its numbers, says how many bytes they take, and chooses the kernel that multiplies with them. What it cannot
do in its kernel `finished` does behind it, so that a new form may start with the product alone. Who multiplies never
reads a weight: the linear maps of `models.linear.maps` ask their form. `models.linear.registry` lists the forms.
"""

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from cairn.kernels.matmul.skinny_plans import BESIDE_RING
from cairn.models.activation import Gate

if TYPE_CHECKING:
    from cairn.kernels.experts.combine_norm import Choices
    from cairn.kernels.norm.join_norm import Parts
    from cairn.kernels.quantize.quantize import Quantized

# A tensor; parts of a sum over K or results of a token's experts, which are summed where they are added; or None: it
# has been added to the residual.
Product: TypeAlias = "Tensor | Parts | Choices | None"
# What enters a product: a tensor, or float8 rows with a scale each, for a form that multiplies those.
Entering: TypeAlias = "Tensor | Quantized"


class Kernels(NamedTuple):
    """GPU kernels that may compute a matmul; they have no gradients."""

    # One tile for any number of rows, so that a row's result depends on it alone.
    invariant: bool = False
    shares_chip: bool = False  # attention of other rows runs at the same time in another stream
    ring: int = BESIDE_RING  # bytes of shared memory that it leaves on a multiprocessor


class Epilogue(NamedTuple):
    """Epilogue of a matmul."""

    gate: Gate | None = None  # the activation to apply
    onto_MN: Tensor | None = None  # the residual that the result is added to next
    kernels: Kernels | None = None  # None: torch's operations, with gradients
    # What multiplies next takes float8 rows; a form may return its result so.
    quantized: bool = False


PLAIN = Epilogue()


class LinearForm(Protocol):
    """A matrix [N, K] that can be multiplied with."""

    @property
    def nbytes(self) -> int: ...

    def covers(self, rows: int) -> bool:
        """Return whether this form supports so many rows; otherwise the parameters are used."""
        ...

    def product(self, x_MK: Tensor, bias_N: Tensor | None, epilogue: Epilogue) -> Product: ...

    def after(self, weight_K: Tensor) -> "LinearForm | None":
        """The product of x * weight_K with the same matrix at no more cost, or None."""
        ...


class AnyRows:
    """Defaults of most forms: any number of rows, and no fused norm."""

    def covers(self, rows: int) -> bool:
        return True

    def after(self, weight_K: Tensor) -> "LinearForm | None":
        return None


@runtime_checkable
class ExpertPairs(Protocol):
    """A form that orders its rows for SwiGLU when it first meets one."""

    def pair(self) -> None: ...


@runtime_checkable
class HasRows(Protocol):
    """A form that single rows can be read of: the lookup of an embedding."""

    def rows(self, rows_T: Tensor) -> Tensor: ...


@runtime_checkable
class Fp8Form(Protocol):
    """A form that multiplies activations in float8, and would rather not quantise them in a kernel of its own."""

    def quantizes(self, rows: int, kernels: Kernels) -> bool:
        """Return whether a matmul with so many rows takes its input as float8 rows."""
        ...


def finished(y_MN: Tensor, bias_N: Tensor | None, epilogue: Epilogue) -> Tensor:
    """Bias and activation behind a product that has neither; the residual is added by the caller."""
    if bias_N is not None:
        y_MN = y_MN + bias_N
    if epilogue.gate is None:
        return y_MN
    gate = epilogue.gate
    return gate.plain(y_MN) if epilogue.kernels is None else gate.fast(y_MN)
