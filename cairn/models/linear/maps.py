"""Linear maps that can be split over ranks. Each owns its parameters and the form that multiplies in their place.

    Columns      several maps of one input (q, k, v; gate, up), split by their outputs
    Rows         one map, split by its inputs; the partial results are summed
    Vocabulary   one row per token: looked up going in, multiplied with going out; split by rows

Everything works on packed tokens [T, D], under autograd and without. The maps of `ColumnParallelLinear` are separate
parameters, as checkpoints store them, so that a weight can stay a view of the mapped file; or one matrix (`fused`), so
that a GPU runs one larger matmul. `form` replaces the parameters by another format of them, and `addend`, for example
an adapter, is added to every result in any format.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.models.build import ModelBuild, Slot, SlotModule
from cairn.models.cpu_half_precision import linear
from cairn.models.linear.float_product import float_product
from cairn.models.linear.form import (
    PLAIN,
    Entering,
    Epilogue,
    ExpertPairs,
    Fp8Form,
    HasRows,
    Kernels,
    LinearForm,
    Product,
    finished,
)
from cairn.models.shards import even_share

if TYPE_CHECKING:
    from cairn.kernels.norm.join_norm import Parts

Addend = Callable[[Tensor], Tensor]  # x [M, K] -> [M, N]


@runtime_checkable
class AddsInPlace(Protocol):
    """An addend that adds to what the product has written, in a kernel."""

    def whole(self, x_MK: Tensor, gated: bool) -> Tensor | None:
        """The product and what is added, computed together, with SwiGLU if `gated`; None: not in such a step."""
        ...

    def onto(self, y_MN: Tensor, x_MK: Tensor) -> Tensor: ...

    def gated(self, y_MN: Tensor, x_MK: Tensor) -> Tensor:
        """SwiGLU of gate and up side by side, with what is added to them."""
        ...


class HasWeights(nn.Module):
    """A matrix and perhaps a bias, without an opinion on how they are used."""

    def __init__(self, build: ModelBuild, rows: int, columns: int, bias: bool) -> None:
        super().__init__()
        self.weight = build.parameter(rows, columns)
        self.bias = build.parameter(rows) if bias else None


class Linear(SlotModule):
    """Base of all linear maps: weights in a form, an optional addend, one matmul entry point."""

    form: LinearForm | None = None  # None: the parameters, in floating point
    form_bias: Tensor | None = None  # the biases of all parts side by side, for the form
    addend: Addend | None = None

    def take(self, form: LinearForm | None) -> None:
        """Multiply in this form from now on."""
        biases = [owner.bias for owner in self.owners() if getattr(owner, "bias", None) is not None]
        self.form = form
        self.form_bias = torch.cat(cast(list[Tensor], biases)).detach() if biases else None

    def owners(self) -> list[nn.Module]:
        """The modules that hold a `weight` each."""
        return [self]

    def matrices(self) -> list[Tensor]:
        return [cast(Tensor, owner.weight) for owner in self.owners()]

    def matrix(self) -> Tensor:
        """The one parameter, for kernels that multiply and differentiate on their own."""
        weights = self.matrices()
        if len(weights) > 1 or self.form is not None:
            raise TypeError(
                "this wants one matrix in floating point: build the model fused, without another form"
            )
        return weights[0]

    def joined(self) -> Tensor:
        """All parts in one matrix [N, K], detached: what another form is made of. One part is not copied."""
        parts = [weight.detach() for weight in self.matrices()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def shape_NK(self) -> tuple[int, int]:
        shapes = [weight.shape for weight in self.matrices()]
        return sum(rows for rows, _ in shapes), shapes[0][1]

    def read_bytes(self) -> int:
        """Bytes that a matmul with one row reads."""
        if self.form is not None and self.form.covers(1):
            return self.form.nbytes
        return sum(weight.nbytes for weight in self.matrices())

    def release(self) -> None:
        """Give back the memory of parameters that the form has replaced for good."""
        for owner in self.owners():
            weight = cast(Tensor, owner.weight)
            blank = torch.empty(weight.shape, device="meta", dtype=weight.dtype)
            owner.weight = nn.Parameter(blank, requires_grad=False)

    def quantizes(self, rows: int, kernels: Kernels) -> bool:
        """Return whether a matmul with so many rows takes its input as float8 rows."""
        form = self.form
        return isinstance(form, Fp8Form) and self.addend is None and form.quantizes(rows, kernels)

    def product(self, x_MK: Entering, epilogue: Epilogue = PLAIN) -> Product:
        """x @ weight.T of all parts side by side, with their biases, and what the epilogue asks for."""
        if self.addend is None:
            return self._multiply(x_MK, epilogue)
        if (
            isinstance(self.form, ExpertPairs)
            and epilogue.gate is not None
            and epilogue.gate.is_swiglu
        ):
            self.form.pair()  # now: a graph with adapters must find the weights where they stay
        if isinstance(self.addend, AddsInPlace):
            return self._with_addend(self.addend, cast(Tensor, x_MK), epilogue)
        y_MN = self._multiply(x_MK, Epilogue(kernels=epilogue.kernels))
        return finished(cast(Tensor, y_MN) + self.addend(cast(Tensor, x_MK)), None, epilogue)

    def _with_addend(self, addend: AddsInPlace, x_MK: Tensor, epilogue: Epilogue) -> Product:
        """Added wherever the product went: to its result, to the first part of a cut sum, or to the residual."""
        swiglu = epilogue.gate is not None and epilogue.gate.is_swiglu
        if (together := addend.whole(x_MK, swiglu)) is not None:
            return together if swiglu else finished(together, None, epilogue)
        y = self._multiply(x_MK, epilogue._replace(gate=None, quantized=False))
        if y is None:
            addend.onto(cast(Tensor, epilogue.onto_MN), x_MK)
            return None
        if not isinstance(y, Tensor):
            addend.onto(cast("Parts", y).sums_SMD[0], x_MK)
            return y
        if swiglu:
            return addend.gated(y, x_MK)
        return finished(addend.onto(y, x_MK), None, epilogue)

    def _multiply(self, x_MK: Entering, epilogue: Epilogue, biased: bool = True) -> Product:
        form = self.form
        quantized = not isinstance(x_MK, Tensor)  # only where `quantizes` said so
        if form is not None and (quantized or form.covers(x_MK.shape[0])):
            return form.product(cast(Tensor, x_MK), self.form_bias if biased else None, epilogue)
        return self._float(cast(Tensor, x_MK), epilogue, biased)

    def _float(self, x_MK: Tensor, epilogue: Epilogue, biased: bool) -> Product:
        bias_N = getattr(self, "bias", None) if biased else None
        return float_product(x_MK, self.matrices()[0], bias_N, epilogue)


class ColumnParallelLinear(Linear):
    """Linear maps of one input, each split over the shards by its outputs."""

    def __init__(self, build: ModelBuild, width: int, parts: dict[str, int], bias: bool) -> None:
        super().__init__()
        self.shards, self.width, self.parts, self.with_bias = build.shards, width, parts, bias
        self.rows = {
            name: even_share(n, build.shards, f"rows of {name}") for name, n in parts.items()
        }
        self.fused = (
            HasWeights(build, sum(self.rows.values()), width, bias) if build.fused else None
        )
        if not build.fused:
            for name, rows in self.rows.items():
                self.add_module(name, HasWeights(build, rows, width, bias))

    def owners(self) -> list[nn.Module]:
        if self.fused is not None:
            return [self.fused]
        return [cast(HasWeights, self._modules[name]) for name in self.parts]

    def forward(self, x_TD: Tensor) -> list[Tensor]:
        x_TD = self.shards.enter(x_TD)
        if self.fused is None and self.addend is None and not self._has_form(x_TD.shape[0]):
            return [linear(x_TD, *_weights(owner)) for owner in self.owners()]
        y_TN = cast(Tensor, self.product(x_TD))
        return list(y_TN.split(list(self.rows.values()), dim=-1))

    def _has_form(self, rows: int) -> bool:
        return self.form is not None and self.form.covers(rows)

    def _float(self, x_MK: Tensor, epilogue: Epilogue, biased: bool) -> Product:
        if self.fused is not None:
            bias_N = self.fused.bias if biased else None
            return float_product(x_MK, self.fused.weight, bias_N, epilogue)
        pairs = [_weights(owner) for owner in self.owners()]
        parts = [linear(x_MK, weight, bias if biased else None) for weight, bias in pairs]
        return finished(torch.cat(parts, -1), None, epilogue)

    def slots(self) -> Iterator[Slot]:
        start = 0
        for name, rows in self.rows.items():
            total, first = self.parts[name], rows * self.shards.rank
            cut = (0, first, first + rows) if rows != total else None
            index = (slice(start, start + rows),) if self.fused else ()
            holder = "fused" if self.fused else name
            yield Slot(f"{name}.weight", f"{holder}.weight", (total, self.width), index, cut)
            if self.with_bias:
                yield Slot(f"{name}.bias", f"{holder}.bias", (total,), index, cut, "zeros")
            start += rows


class RowParallelLinear(Linear):
    """A linear map split over the shards by its inputs; the partial results are summed."""

    def __init__(self, build: ModelBuild, width: int, out: int, bias: bool) -> None:
        local = even_share(width, build.shards, "input columns")
        super().__init__()
        self.shards, self.shape = build.shards, (out, width)
        self.weight = build.parameter(out, local)
        self.bias = build.parameter(out) if bias else None

    def forward(self, x_TF: Tensor) -> Tensor:
        return cast(Tensor, self.product(x_TF))

    def product(self, x_MK: Entering, epilogue: Epilogue = PLAIN) -> Product:
        if self.shards.size == 1:
            return super().product(x_MK, epilogue)
        partial_MN = cast(
            Tensor, self._multiply(x_MK, Epilogue(kernels=epilogue.kernels), biased=False)
        )
        if self.addend is not None:
            partial_MN = partial_MN + self.addend(cast(Tensor, x_MK))
        return self.summed(partial_MN)

    def summed(self, partial_MN: Tensor) -> Tensor:
        """Over the ranks; the bias once, not once per shard."""
        y_MN = self.shards.reduce(partial_MN)
        return y_MN if self.bias is None else y_MN + self.bias

    def slots(self) -> Iterator[Slot]:
        local = self.weight.shape[1]
        first = local * self.shards.rank
        cut = (1, first, first + local) if local != self.shape[1] else None
        yield Slot("weight", "weight", self.shape, cut=cut)
        if self.bias is not None:
            yield Slot("bias", "bias", self.shape[:1], init="zeros")


class Vocabulary(Linear):
    """Embedding and LM head. Ranks hold equally many rows; rows beyond the vocabulary are zero and never looked up."""

    lookup_addend: Addend | None = None  # tokens [T] -> [T, D]
    lookup: HasRows | None = None  # where rows are read, if not in the form that multiplies

    def __init__(self, build: ModelBuild, vocab: int, width: int) -> None:
        super().__init__()
        self.shards, self.shape = build.shards, (vocab, width)
        self.rows = -(-vocab // build.shards.size)
        self.weight = build.parameter(self.rows, width)

    def forward(self, tokens_T: Tensor) -> Tensor:
        x_TD = self.looked_up(tokens_T)
        return x_TD if self.lookup_addend is None else x_TD + self.lookup_addend(tokens_T)

    def looked_up(self, tokens_T: Tensor) -> Tensor:
        """The rows themselves, without what an adapter adds."""
        if self.lookup is not None:
            return self.lookup.rows(tokens_T)
        if isinstance(self.form, HasRows):
            return self.form.rows(tokens_T)
        if self.shards.size == 1:
            return F.embedding(tokens_T, self.weight)
        local_T = tokens_T - self.rows * self.shards.rank
        mine_T = (local_T >= 0) & (local_T < self.rows)
        x_TD = F.embedding(local_T.where(mine_T, 0), self.weight) * mine_T[:, None]
        return self.shards.reduce(x_TD)

    def release(self) -> None:
        """Shape, type and device stay, which the parameter tells of the whole model."""
        nowhere = torch.full((1, 1), float("nan"), dtype=self.weight.dtype)
        self.weight = nn.Parameter(nowhere.expand(self.weight.shape), requires_grad=False)

    def logits(self, x_TD: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
        return self.shards.gather(self.local_logits(x_TD, epilogue))[..., : self.shape[0]]

    def local_logits(self, x_TD: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
        """Scores of this rank's rows of the vocabulary."""
        return cast(Tensor, self.product(self.shards.enter(x_TD), epilogue))

    def slots(self) -> Iterator[Slot]:
        first = min(self.rows * self.shards.rank, self.shape[0])
        last = min(first + self.rows, self.shape[0])
        if self.shards.size == 1:
            yield Slot("weight", "weight", self.shape)
        else:
            yield Slot("weight", "weight", self.shape, (slice(0, last - first),), (0, first, last))


def _weights(owner: nn.Module) -> tuple[Tensor, Tensor | None]:
    return cast(Tensor, owner.weight), cast(Tensor | None, owner.bias)


def linears(model: nn.Module) -> Iterator[Linear]:
    """Every linear map that multiplies, but for the embedding of a model whose head is another one."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            yield module
    head = getattr(model, "head", None) or getattr(model, "embedding", None)
    if isinstance(head, Vocabulary):
        yield head


def held_bytes(model: nn.Module) -> int:
    """Bytes of all weights in memory; tied weights count once and released ones do not count."""
    storages = (tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers()))
    by_address = {storage.data_ptr(): storage.nbytes() for storage in storages}
    by_address.pop(0, None)  # the meta device
    forms = [part.form for part in model.modules() if isinstance(part, Linear)]
    for part in model.modules():  # of experts
        forms += getattr(part, "forms", None) or ()
    return sum(by_address.values()) + sum(form.nbytes for form in forms if form is not None)
