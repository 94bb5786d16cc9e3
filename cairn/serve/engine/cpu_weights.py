"""Weight format on a CPU, chosen by the stored format and by measurement, and logged.

    auto    quantised matrices stay as they are stored, as with `packed`. Without a compiler they get as few bits as
            they have, where that is faster: 4-bit groups stay what they are, other matrices become 8-bit rows. A
            checkpoint in floating point stays as it is, and so does an output projection that a quantised checkpoint
            has in floating point
    packed  matrices of a GGUF file stay mapped as they are stored, those of other quantised checkpoints are packed rows
            with the same numbers (`models.linear.blocks`); wants a C compiler
    float   the numbers of the checkpoint: the exact form, and the slowest
    int8    all matrices as 8-bit rows: by our kernels or by torch's, whichever are faster here
    int4    all matrices but the output projection in 4-bit groups; that one as 8-bit rows

Whether 8-bit rows and 4-bit groups pay is measured, on one thread and by its own clock, so that a busy machine decides
the same. Which columns of the activations are outliers is seen in a pass over random tokens. The others are rounded to
8 bits for 4-bit groups, and to 16 for 8-bit rows and blocks: an answer is then the same in any batch, but for ties.
`models.linear.packed` has the arithmetic of torch's forms. An embedding that is the output projection, too, is looked
up in our 8-bit rows; others stay as they are, and so do experts. A GGUF file is mapped, and its matrices are
dequantised for packing some rows at a time, so that a model in floating point is never in memory.
"""

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from cairn.core.errors import HardwareError
from cairn.core.units import format_bytes
from cairn.kernels.cpu.level_rows import RowsOfMatrix
from cairn.models.attend import PackedDocuments
from cairn.models.cpu_half_precision import linear
from cairn.models.linear.blocks import FLOAT_ROWS, NEVER, BlocksForm, RoundedRows
from cairn.models.linear.form import Epilogue
from cairn.models.linear.level_blocks import pack_planes
from cairn.models.linear.maps import Linear, Vocabulary, linears
from cairn.models.linear.packed import Int4, Int8, Levels
from cairn.models.linear.planes_form import PlanesForm, SideBySide
from cairn.models.transformer import Layer, Transformer
from cairn.serve.engine.cpu_threads import one_thread

Choice = Literal["auto", "float", "int8", "int4", "packed"]
FewBits = Int4 | Int8 | RoundedRows
LEAST_GAIN = 1.1  # times as fast as floating point, or auto leaves the weights alone
TOKENS = (1, 8)  # of the trials
TRIALS = 6
FEW_THREADS = 4  # with which packing is no faster than on one
# Columns of x that are not rounded; of what attention gives, which is a mean of values, none.
OUTLIERS = 8
TRIAL_ROWS = 8192  # of a matrix that is timed
SEEN = 64  # random tokens in which they are found
QUANTISED_BITS = 9  # of a weight in the file, scales included, up to which it counts as quantised


class Map(NamedTuple):
    """A product to be timed."""

    columns: int  # of its input
    multiply: Callable[[Tensor], Tensor]


class Largest:
    """Multiplies as a map does, and keeps how large each column of x becomes."""

    def __init__(self, part: Linear) -> None:
        """Parts of a map are not joined here: every matrix would be held twice."""
        self.blocks = _stored(part)
        self.weights, self.largest_K = part.matrices(), torch.zeros(part.shape_NK()[1])
        self.nbytes = 0

    def covers(self, rows: int) -> bool:
        return True

    def after(self, weight_K: Tensor) -> None:
        return None

    def product(self, x_MK: Tensor, bias_N: Tensor | None, epilogue: Epilogue) -> Tensor:
        self.largest_K = torch.maximum(self.largest_K, x_MK.abs().amax(0))
        if self.blocks is not None:
            return self.blocks.product(x_MK, bias_N)
        y_MN = torch.cat([linear(x_MK, weight_NK) for weight_NK in self.weights], dim=-1)
        return y_MN if bias_N is None else y_MN + bias_N


@torch.inference_mode()
def pack_weights(
    model: Transformer,
    choice: Choice,
    bits: float,
    head_bits: float | None = None,
    *,
    release: bool = False,
) -> str:
    """Give the matrices of a model their form; says which, and why.

    `bits`: of a layer's weight in the file; `head_bits`: of the output projection's, if they are others. `release`:
    nothing else uses the model, so what is packed is not kept as it was.
    """
    of_planes = choice in ("auto", "packed") and _has_planes(model)
    rounded = pack_planes(model) if of_planes else []
    blocks = [form for part in linears(model) if (form := _stored(part)) is not None]
    if choice == "packed" or of_planes or (choice == "auto" and _mostly_blocks(model)):
        if release:
            _return_freed_memory()
        return _stay_packed(blocks, rounded)
    for part in linears(model):
        if _stored(part) is None:
            part.take(None)
    if choice == "float":
        return "weights as they are, as asked"
    why_not = _obstacle(model, choice, bits)
    if why_not and choice == "auto":
        return _stay_packed(blocks) if blocks else f"weights as they are: {why_not}"
    if why_not:
        raise HardwareError(f"no {choice} weights: {why_not}", hint="use --weights auto")
    whole_head = choice == "auto" and (head_bits or bits) > QUANTISED_BITS
    every = [part for part in linears(model) if not (whole_head and isinstance(part, Vocabulary))]
    if (stored := _stored(model.embedding)) is not None:
        model.embedding.lookup = stored  # whatever multiplies with it
    # Hundreds of short operations: of few threads, each waits for the others longer than it computes.
    with one_thread(where_at_most=FEW_THREADS):
        packing = _Packing(choice, _outliers(model, every))
        some = _one_of_each_shape(every)
        packing.choose_rows([_matrix(part)[:TRIAL_ROWS] for part in some])
        gain = _gain([packing.pair(part) for part in some])
        if choice == "auto" and gain < LEAST_GAIN:
            slower = f"weights as they are: packed they are {gain:.2f} times as fast"
            return _stay_packed(blocks) if blocks else slower
        for part in every:
            stored, packed_form = _stored(part), packing.pack(part)
            part.take(packed_form)
            if stored is not None:
                stored.matrix.let_go()
            looked_up = isinstance(packed_form, RoundedRows)  # in the form itself
            if release and (part is not model.embedding or looked_up):
                part.release()
    if release:
        _return_freed_memory()
    whole = _whole(model, whole_head)
    speed = f"{gain:.1f} times as fast as float32, measured"
    return f"weights: {packing.summary()}; {whole}; {speed}; exact: --weights float"


def _stored(part: Linear) -> BlocksForm | None:
    """The blocks of the checkpoint, where a map has them."""
    form = part.form
    return form if isinstance(form, BlocksForm) and not isinstance(form, RoundedRows) else None


def _has_planes(model: Transformer) -> bool:
    """Quantised matrices were loaded as they are stored, and not dequantised."""
    return any(isinstance(part.form, PlanesForm | SideBySide) for part in linears(model))


def _mostly_blocks(model: Transformer) -> bool:
    """A file may have some matrices in types without a kernel; few of those are dequantised, and not many."""
    values = {part: math.prod(part.shape_NK()) for part in linears(model)}
    kept = sum(count for part, count in values.items() if _stored(part) is not None)
    return 2 * kept > sum(values.values())


def _stay_packed(blocks: list[BlocksForm], rounded: Sequence[str] = ()) -> str:
    if not blocks:
        return "weights as they are: none in this file is in blocks that a CPU multiplies with"
    size = format_bytes(sum(form.nbytes for form in blocks), "binary")
    if any(one.mapped for form in blocks for one in form.matrix.blocks):
        size += ", mapped"
    always = all(form.float_rows == NEVER for form in blocks)
    when = "" if always else f" in steps of fewer than {FLOAT_ROWS} tokens"
    how = "stay packed as in the file"
    if rounded:
        how = f"are packed, of which {len(rounded)} rounded to 8-bit rows ({rounded[0]})"
    return (
        f"weights: {len(blocks)} matrices {how}, {size}; activations rounded to 16 bits{when}; "
        "exact: --weights float"
    )


def _whole(model: Transformer, whole_head: bool) -> str:
    """Describe the weights that are not packed, and their memory."""
    if model.embedding.lookup is not None:
        return "the embedding is looked up in the file, mapped"
    if isinstance(model.embedding.form, BlocksForm):
        return "the embedding is looked up in them"
    head = (model.head if whole_head else None) or model.embedding
    size = format_bytes(sum(part.weight.nbytes for part in {model.embedding, head}), "binary")
    also = " and the output projection" if whole_head else ""
    return f"the embedding{also} in float32, {size}"


def _return_freed_memory() -> None:
    """Return freed memory to the system; glibc would keep hundreds of freed matrices."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # None: another C library
    if trim is not None:
        trim(0)


def packed(model: Transformer) -> bool:
    return any(isinstance(part.form, Int4 | Int8 | BlocksForm) for part in linears(model))


class _Packing:
    """Packs one matrix after another, and remembers what was chosen."""

    def __init__(self, choice: Choice, outliers: dict[Linear, Tensor]) -> None:
        self.choice, self.outliers, self.nbytes = choice, outliers, 0
        self.count = {"4-bit groups": 0, "8-bit rows": 0}
        self.own_rows = False  # 8-bit rows are multiplied by our kernels, not by torch's

    def choose_rows(self, matrices: list[Tensor]) -> None:
        """Choose the row format by timing both on some rows of each shape."""
        if any(RoundedRows.obstacle(w_NK.shape[1]) for w_NK in matrices):
            return
        self.own_rows = True
        if Int8.obstacle(1, 64) is None:
            none_O = torch.empty(0, dtype=torch.long)
            torchs = [Map(w_NK.shape[1], Int8(w_NK, none_O).product) for w_NK in matrices]
            ours = [Map(w_NK.shape[1], RoundedRows(w_NK).product) for w_NK in matrices]
            self.own_rows = _gain(list(zip(torchs, ours, strict=True))) >= 1.0

    def pack(self, part: Linear) -> FewBits:
        form = self._form(part, _matrix(part))
        self.count["4-bit groups" if isinstance(form, Int4) else "8-bit rows"] += 1
        self.nbytes += form.nbytes
        return form

    def pair(self, part: Linear) -> tuple[Map, Map]:
        """The product with some rows of its matrix as they are, and packed."""
        weight_NK = _matrix(part)[:TRIAL_ROWS]
        columns, form = weight_NK.shape[1], self._form(part, weight_NK)
        return Map(columns, lambda x_MK: linear(x_MK, weight_NK)), Map(columns, form.product)

    def _form(self, part: Linear, weight_NK: RowsOfMatrix) -> FewBits:
        outliers_O = self.outliers[part]
        four = self.choice != "int8" and not isinstance(part, Vocabulary)
        if four and Int4.obstacle(weight_NK.shape[0], weight_NK.shape[1]) is None:
            whole_NK = weight_NK[:]
            levels = Levels(whole_NK)
            if self.choice == "int4" or levels.exact(whole_NK):
                return Int4(levels, outliers_O)
        if not self.own_rows:
            return Int8(weight_NK, outliers_O)
        rows = [len(weight) for weight in part.matrices()]
        return RoundedRows(weight_NK, rows if sum(rows) == weight_NK.shape[0] else None)

    def summary(self) -> str:
        counts = ", ".join(
            f"{count} matrices in {name}" for name, count in self.count.items() if count
        )
        size = format_bytes(self.nbytes, "binary")
        bits = 8 if self.count["4-bit groups"] else 16
        columns = "" if self.own_rows and bits == 16 else f" but for {OUTLIERS} columns"
        return f"{counts}, {size}, activations rounded to {bits} bits{columns}"


def _matrix(part: Linear) -> RowsOfMatrix:
    """The matrix of a linear map in floating point, or one that dequantises rows on access."""
    return _stored(part) or part.joined()


def _outliers(model: Transformer, every: list[Linear]) -> dict[Linear, Tensor]:
    """The columns of each matrix's input that become largest over tokens drawn at random."""
    seen, before = {part: Largest(part) for part in every}, {part: part.form for part in every}
    for part, largest in seen.items():
        part.take(largest)
    try:
        chance = torch.Generator().manual_seed(0)
        count = min(SEEN, model.spec.context)
        tokens_T = torch.randint(model.spec.vocab, (count,), generator=chance)
        attend = PackedDocuments([len(tokens_T)])
        model.logits(model(tokens_T, attend.positions_T(), attend))
    finally:
        for part, form in before.items():
            part.take(form)
    averaged = {cast(Layer, layer).attention.out for layer in model.layers}
    return {
        part: _largest(found.largest_K, 0 if part in averaged else OUTLIERS)
        for part, found in seen.items()
    }


def _largest(peak_K: Tensor, count: int) -> Tensor:
    return peak_K.topk(min(count, len(peak_K))).indices.sort().values


def _one_of_each_shape(every: list[Linear]) -> list[Linear]:
    """Select a linear map of each shape from the middle of the model, whose layers are typical."""
    half = every[len(every) // 2 :]
    return list({tuple(weight.shape for weight in p.matrices()): p for p in half}.values())


def _obstacle(model: Transformer, choice: Choice, bits: float) -> str | None:
    weight = model.embedding.weight
    if weight.is_cuda or weight.dtype != torch.float32:
        return "packed weights want float32 activations on a CPU"
    if model.build.shards.size > 1:
        return "the model is shared between processes"
    if choice == "auto" and bits > QUANTISED_BITS:
        return f"the checkpoint has {bits:g} bits for a weight, and fewer would change its answers"
    widths = {part.shape_NK()[1] for part in linears(model)}
    return Int8.obstacle(1, 64) if any(map(RoundedRows.obstacle, widths)) else None


def _gain(pairs: list[tuple[Map, Map]]) -> float:
    """Speedup of the packed formats over one matrix of each shape, the lower of one and eight tokens.

    On one thread and by its own clock, which does not run while others have the CPU: a busy machine answers the same.
    """
    with one_thread():
        return min(_gain_of(pairs, tokens) for tokens in TOKENS)


def _gain_of(pairs: list[tuple[Map, Map]], tokens: int) -> float:
    """The best of several trials of each, alternating."""
    best = [[float("inf"), float("inf")] for _ in pairs]
    for _ in range(TRIALS):
        for pair, times in zip(pairs, best, strict=True):
            for which, product in enumerate(pair):
                times[which] = min(times[which], _seconds(product, tokens))
    plain, packed = (sum(column) for column in zip(*best, strict=True))
    return plain / packed


def _seconds(product: Map, tokens: int) -> float:
    x_MK = torch.ones(tokens, product.columns)
    began = time.thread_time()
    product.multiply(x_MK)
    return time.thread_time() - began
