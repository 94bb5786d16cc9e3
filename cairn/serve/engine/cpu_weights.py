"""In which form do the weights serve on this CPU? Decided by what the file holds and what is measured here, and said.

    auto    as few bits as the file has, where that is faster: 4-bit groups of a GGUF file stay what they are, other
            quantised matrices become 8-bit rows, and a checkpoint in floating point stays as it is
    float   the numbers of the checkpoint: the exact form, and the slowest
    int8    all matrices as 8-bit rows
    int4    all matrices but the output projection in 4-bit groups; that one as 8-bit rows

Whether packed forms pay is measured, on one thread and by its own clock, so that a busy machine decides the same. Which
columns of the activations are outliers is seen in a pass over random tokens. Activations are rounded to 8 bits, which
is the larger part of the error; `models.packed_weights` has the arithmetic. The embedding stays as it is: it is looked
up, not multiplied with. Experts stay as they are, too.
"""

import time
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.core.errors import HardwareError
from cairn.core.units import format_bytes
from cairn.models.attend import Packed
from cairn.models.layers import Columns, Rows, Vocabulary, Weights
from cairn.models.packed_weights import Float, Int4, Int8, Levels, Product
from cairn.models.transformer import Layer, Transformer
from cairn.serve.engine.cpu_layout import matrices, places

Form = Literal["auto", "float", "int8", "int4"]
Place = Columns | Rows | Vocabulary
LEAST_GAIN = 1.1  # times as fast as floating point, or auto leaves the weights alone
TOKENS = (1, 8)  # of the trials
TRIALS = 6
OUTLIERS = (
    8  # columns of x that are not rounded; of what attention gives, which is a mean of values, none
)
SEEN = 64  # random tokens in which they are found
QUANTISED_BITS = (
    9  # bits of a weight in the file, scales included, up to which it counts as quantised
)


class Peak:
    """Multiplies as the matrix does, and sees how large each column of x becomes."""

    def __init__(self, weight_NK: Tensor) -> None:
        self.weight_NK, self.peak_K = weight_NK, torch.zeros(weight_NK.shape[1])

    def __call__(self, x_MK: Tensor) -> Tensor:
        self.peak_K = torch.maximum(self.peak_K, x_MK.abs().amax(0))
        return F.linear(x_MK, self.weight_NK)


@torch.inference_mode()
def pack_weights(model: Transformer, form: Form, bits: float, *, release: bool = False) -> str:
    """Give the matrices of a model their form; says which, and why.

    `bits`: of a weight in the file. `release`: nobody else uses the model, so what is packed is not kept as it was.
    """
    _unpack(model)
    if form == "float":
        return "weights as they are, as asked"
    why_not = _obstacle(model, form, bits)
    if why_not and form == "auto":
        return f"weights as they are: {why_not}"
    if why_not:
        raise HardwareError(f"no {form} weights: {why_not}", hint="use --weights auto")
    every = list(places(model))
    packing = _Packing(form, _outliers(model, every))
    gain = _gain([packing.pair(place) for place in _one_of_each_shape(every)])
    if form == "auto" and gain < LEAST_GAIN:
        return f"weights as they are: packed they are {gain:.2f} times as fast"
    found = {place: packing.pack(place) for place in every}
    for place, product in found.items():
        place.packed = product
        if isinstance(place, Columns) and place.with_bias:
            place.joined_bias = torch.cat(
                [b for part in _parts(place) if (b := part.bias) is not None]
            )
    if release:
        _release(list(found), model)
    return f"weights: {packing.summary()}; {gain:.1f} times as fast as float32, measured; exact: --weights float"


def packed(model: Transformer) -> bool:
    return any(place.packed is not None for place in places(model))


class _Packing:
    """Packs one matrix after another, and remembers what was chosen."""

    def __init__(self, form: Form, outliers: dict[Place, Tensor]) -> None:
        self.form, self.outliers, self.nbytes = form, outliers, 0
        self.count = {"4-bit groups": 0, "8-bit rows": 0}

    def pack(self, place: Place) -> Product:
        product = self._product(place)
        self.count["8-bit rows" if isinstance(product, Int8) else "4-bit groups"] += 1
        self.nbytes += product.nbytes
        return product

    def pair(self, place: Place) -> tuple[Float, Product]:
        """The same matrix as it is, and packed."""
        return Float(_joined(place)), self._product(place)

    def _product(self, place: Place) -> Product:
        weight_NK, outliers_O = _joined(place), self.outliers[place]
        four = self.form != "int8" and not isinstance(place, Vocabulary)
        if four and Int4.obstacle(*weight_NK.shape) is None:
            levels = Levels(weight_NK)
            if self.form == "int4" or levels.exact(weight_NK):
                return Int4(levels, outliers_O)
        return Int8(weight_NK, outliers_O)

    def summary(self) -> str:
        counts = ", ".join(
            f"{count} matrices in {name}" for name, count in self.count.items() if count
        )
        size = format_bytes(self.nbytes, "binary")
        return f"{counts}, {size}, activations rounded to 8 bits but for {OUTLIERS} columns"


def _outliers(model: Transformer, every: list[Place]) -> dict[Place, Tensor]:
    """The columns of each matrix's input that become largest over tokens drawn at random."""
    peaks = {place: Peak(_joined(place)) for place in every}
    for place, peak in peaks.items():
        place.packed = peak
    try:
        chance = torch.Generator().manual_seed(0)
        tokens_T = torch.randint(
            model.spec.vocab, (min(SEEN, model.spec.context),), generator=chance
        )
        attend = Packed([len(tokens_T)])
        model.logits(model(tokens_T, attend.positions_T(), attend))
    finally:
        _unpack(model)
    averaged = {cast(Layer, layer).attention.out for layer in model.layers}
    return {place: _largest(peak.peak_K, 0 if place in averaged else OUTLIERS)
            for place, peak in peaks.items()}  # fmt: skip


def _largest(peak_K: Tensor, count: int) -> Tensor:
    return peak_K.topk(min(count, len(peak_K))).indices.sort().values


def _one_of_each_shape(every: list[Place]) -> list[Place]:
    """From the middle of the model, where layers are like most others."""
    half = every[len(every) // 2 :]
    return list(
        {tuple(matrix.shape for matrix in matrices(place)): place for place in half}.values()
    )


def _joined(place: Place) -> Tensor:
    return torch.cat([matrix.detach() for matrix in matrices(place)])


def _obstacle(model: Transformer, form: Form, bits: float) -> str | None:
    weight = model.embedding.weight
    if weight.is_cuda or weight.dtype != torch.float32:
        return "packed weights want float32 activations on a CPU"
    if model.build.shards.size > 1:
        return "the model is shared between processes"
    if form == "auto" and bits > QUANTISED_BITS:
        return f"the checkpoint has {bits:g} bits for a weight, and fewer would change its answers"
    if why_not := Int8.obstacle(1, 64):
        return why_not
    return None


def _parts(place: Columns) -> list[Weights]:
    return [place.fused] if place.fused is not None else place.separate()


def _unpack(model: Transformer) -> None:
    for place in places(model):
        place.packed = None


def _release(found: list[Place], model: Transformer) -> None:
    """Give back the memory of matrices that nothing reads any more."""
    for place in found:
        if place is model.embedding:
            continue
        owners = _parts(place) if isinstance(place, Columns) else [place]
        for owner in owners:
            blank = torch.empty(owner.weight.shape, device="meta", dtype=owner.weight.dtype)
            owner.weight = nn.Parameter(blank, requires_grad=False)


def _gain(pairs: list[tuple[Float, Product]]) -> float:
    """How many times as fast the packed forms are, one matrix of each shape, the lesser of one token and eight.

    On one thread and by its own clock, which does not run while others have the CPU: a busy machine answers the same.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return min(_gain_of(pairs, tokens) for tokens in TOKENS)
    finally:
        torch.set_num_threads(threads)


def _gain_of(pairs: list[tuple[Float, Product]], tokens: int) -> float:
    """The best of several trials of each, in turns."""
    best = [[float("inf"), float("inf")] for _ in pairs]
    for _ in range(TRIALS):
        for pair, times in zip(pairs, best, strict=True):
            for which, product in enumerate(pair):
                times[which] = min(times[which], _seconds(product, tokens))
    plain, packed = (sum(column) for column in zip(*best, strict=True))
    return plain / packed


def _seconds(product: Product, tokens: int) -> float:
    x_MK = torch.ones(tokens, product.columns)
    began = time.thread_time()
    product(x_MK)
    return time.thread_time() - began
