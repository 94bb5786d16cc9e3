"""Opening a model by name: the tokenizer immediately, the weights when they are needed.

    opened = open_model("runs/x")           reads headers: a bad prompt is refused before gigabytes move
    runnable = opened.load("auto", "auto")

Where a choice is automatic, `summary` says what was chosen and why. Shows a progress bar while weights load, if
stderr is a terminal.
"""

from collections.abc import Sequence

import torch

from cairn.core.garbage_collection import held_collector
from cairn.core.units import format_bytes, format_count
from cairn.hw.cpu_types import multiplies
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import Checkpoint, check_device, default_device, open_checkpoint
from cairn.models.hub import resolve
from cairn.models.linear.maps import held_bytes, linears
from cairn.models.presets import preset
from cairn.models.rope_scaling import stretched
from cairn.models.sampling_defaults import Defaults, sampling_defaults
from cairn.models.shards import ALONE, Shards
from cairn.models.spec import ModelSpec
from cairn.models.tokenizer import Tokenizer
from cairn.models.transformer import Transformer
from cairn.models.vision.spec import VisionSpec
from cairn.models.vision.tower import Tower
from cairn.models.weights import random_model
from cairn.models.weights_fit import check_fits
from cairn.report.progress import byte_progress

RANDOM = "random:"
# Weights of a feed-forward matrix. A call in bfloat16 costs more than smaller ones save: a product with one token takes
# 1.9 to 3 times as long as in float32, with eight 0.9 to 2.2 times (benchmarks/cpu/dtypes_x86.json, and without AMX).
SMALL_MATRIX = 1 << 19
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}


class Runnable:
    """A model that is ready, and how it came to run where it runs."""

    def __init__(
        self,
        name: str,
        model: Transformer,
        why: str,
        bits: float | None = None,
        head_bits: float | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """`bits`: of a layer's weight in the file, scales included, where it has fewer than the model.

        `head_bits`: of the output projection's, where it has others.
        """
        self.name, self.model, self.why, self.notes = name, model, why, list(notes)
        # Of keys and values in 8 bits, for each layer, where the checkpoint has them.
        self.cache_scales: list[tuple[float, float]] | None = None
        self.tower: Tower | None = None  # of a model that sees
        weight = model.embedding.weight
        self.device, self.dtype = str(weight.device), str(weight.dtype).removeprefix("torch.")
        self.bits = 8.0 * weight.itemsize if bits is None else bits
        self.head_bits = self.bits if head_bits is None else head_bits

    def bytes_per_token(self) -> float:
        """Weights that one decoded token has to read: all that it visits, once."""
        if self.model.spec.experts is None:
            return float(sum(part.read_bytes() for part in linears(self.model)))
        return self.model.spec.matmul_parameters() * self.model.embedding.weight.itemsize

    def summary(self) -> str:
        spec = self.model.spec
        size = format_bytes(held_bytes(self.model), "decimal")
        return (
            f"{self.name}: {spec.family}, {format_count(spec.parameters())} parameters, {size}, "
            f"computed in {self.dtype} on {self.device} ({self.why})"
        )


class OpenModel:
    """A model whose shape and vocabulary are known and whose weights are not loaded yet."""

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        eos_ids: tuple[int, ...],
        checkpoint: Checkpoint | None,
    ) -> None:
        self.name, self.spec, self.tokenizer = name, spec, tokenizer
        self.eos_ids, self.checkpoint = eos_ids, checkpoint
        generation = {} if checkpoint is None else checkpoint.generation
        self.sampling: Defaults = sampling_defaults(name, generation)

    @property
    def vision(self) -> VisionSpec | None:
        """Specification of the vision encoder; None for text-only models."""
        return None if self.checkpoint is None else self.checkpoint.vision

    def load(
        self,
        device: str = "auto",
        dtype: str = "auto",
        shards: Shards = ALONE,
        packed: bool = False,
    ) -> Runnable:
        """`packed`: quantised matrices stay as they are stored; else they are dequantised."""
        device = default_device() if device == "auto" else device
        check_device(device)
        stored = self.checkpoint.stored_dtype() if self.checkpoint else torch.bfloat16
        quantised = self.checkpoint is not None and self.checkpoint.quantised()
        notes: list[str] | None = [] if packed and quantised else None
        chosen, why = choose_dtype(stored, quantised, device, dtype, self.spec)
        few_bits = quantised and self.checkpoint is not None and self.checkpoint.stored_bits() < 16
        if few_bits and device == "cpu" and dtype == "auto":
            chosen, why = torch.float32, "a CPU computes with quantised weights in float32"
        mapped = self.checkpoint is not None and not quantised and chosen == stored
        stored_bytes = None
        if self.checkpoint is not None and notes is not None:
            stored_bytes = self.checkpoint.stored_bytes()
        check_fits(self.name, self.spec, chosen, device, shards.size, mapped, stored_bytes)
        if self.checkpoint is None:
            build = ModelBuild(device, chosen, shards, fused=device != "cpu")
            return Runnable(self.name, random_model(self.spec, build).eval(), "random weights")
        with byte_progress(self.checkpoint.nbytes(), f"loading {self.name}") as progress:
            model = self.checkpoint.load(
                device, chosen, shards=shards, progress=progress, notes=notes
            )
        bits, head_bits = self.checkpoint.stored_bits(), self.checkpoint.head_bits()
        runnable = Runnable(self.name, model, why, bits, head_bits, notes or ())
        runnable.cache_scales = self.checkpoint.cache_scales()
        runnable.tower = self.checkpoint.load_tower(device, chosen)
        return runnable


@held_collector()  # a vocabulary is a million objects, among which there is nothing to collect
def open_model(name: str, context: int | None = None) -> OpenModel:
    """`context`: tokens that the model is to see, stretched where it was trained for fewer."""
    spec, checkpoint = _headers(name, context)
    if checkpoint is None:
        return OpenModel(name, spec, None, (), None)
    tokenizer = checkpoint.tokenizer()
    tokenizer.reads_parts = checkpoint.vision is not None
    eos_ids = checkpoint.eos_ids or tokenizer.eos_ids
    return OpenModel(name, spec, tokenizer, eos_ids, checkpoint)


def spec_of(name: str, context: int | None = None) -> ModelSpec:
    """The shape alone: building a tokenizer takes seconds."""
    return _headers(name, context)[0]


def _headers(name: str, context: int | None) -> tuple[ModelSpec, Checkpoint | None]:
    checkpoint = None if name.startswith(RANDOM) else open_checkpoint(resolve(name))
    spec = preset(name.removeprefix(RANDOM)) if checkpoint is None else checkpoint.spec
    spec = spec if context is None else stretched(spec, context)
    if checkpoint is not None:
        checkpoint.spec = spec
    return spec, checkpoint


def choose_dtype(
    stored: torch.dtype, quantised: bool, device: str, option: str, spec: ModelSpec | None = None
) -> tuple[torch.dtype, str]:
    """The type to compute in, and why. `spec`: of a model that generates, most of whose steps have few tokens."""
    if option != "auto":
        return DTYPES[option], "as asked"
    if device != "cpu":
        if quantised or stored == torch.float32:
            return torch.bfloat16, "a GPU multiplies fastest in bfloat16"
        return stored, "the weights have this type"
    if stored == torch.bfloat16 and not multiplies("bf16"):
        return torch.float32, "this CPU does not multiply in bfloat16"
    if stored == torch.bfloat16 and spec is not None and has_small_matrices(spec):
        return torch.float32, "a CPU multiplies tokens with small matrices faster in float32"
    if stored == torch.float16:
        return torch.float32, "CPUs multiply faster in float32 than in float16"
    return stored, "the weights have this type"


def has_small_matrices(spec: ModelSpec) -> bool:
    return spec.hidden * spec.intermediate < SMALL_MATRIX
