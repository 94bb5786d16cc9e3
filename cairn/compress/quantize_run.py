"""All of `cairn quantize`: open, check, calibrate, round, judge, write.

Whatever can be refused is refused before weights are loaded; the folder appears when it is complete.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from cairn.compress.calibration import SHIPPED, CalibrationText, read_text
from cairn.compress.layer_by_layer import matrix_slots, matrix_widths
from cairn.compress.open_model import Whole, check_out, open_whole
from cairn.compress.quality import Quality, Reference
from cairn.compress.quantize import Method, QuantizeSettings, Rounded, check_pair, quantize_model
from cairn.compress.quantize_report import QuantizeResult, kept_words, write_page
from cairn.core.errors import ConfigError
from cairn.core.units import format_bytes
from cairn.models.gguf.write import check_source, write_gguf
from cairn.models.quantized.matrices import matrices_of
from cairn.models.quantized.rounding import GGUF_SCHEMES, SCHEMES, QuantizationGrid, fitted
from cairn.models.quantized.stored_planes import check_shared_rows
from cairn.models.quantized.write import QuantizedModel, check_family, write_compressed_tensors
from cairn.models.transformer import Transformer
from cairn.report.progress import progress
from cairn.train.data.tokenizer_trainer import write_tokenizer_files

Say = Callable[[str], None]
ON_CPU, ON_GPU = (32, 512), (512, 2048)  # windows, tokens of each
PAGE, RECORD = "quantize.html", "quantize.json"


class QuantizeJob(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a quantisation run; see the flags of `cairn quantize`."""

    model: str
    scheme: str
    method: Method
    out: Path
    data: Path | None = None
    judge: Path | None = None
    samples: int = 0
    length: int = 0
    judged: int = 8
    group: int | None = None
    symmetric: bool = True
    ordered: bool = True
    strength: float | None = None
    keep: tuple[str, ...] = ()
    most_added: float | None = None
    dtype: str = "auto"
    device: str = "auto"


def quantize(job: QuantizeJob, say: Say = lambda text: None) -> QuantizeResult:
    began = time.perf_counter()
    _check(job)
    whole = open_whole(job.model, job.device, job.dtype)
    model, notes = whole.model, list(whole.notes)
    if job.scheme in GGUF_SCHEMES:
        check_source(whole.file, model.spec.family)
    else:
        check_family(model)
    check_kept(job.keep, model)
    grid, note = fitted(job.scheme, matrix_widths(model), job.group)
    check_shared_rows(model, matrix_slots(model), grid.block_rows)
    notes += [note] if note else []
    grid = replace(grid, symmetric=job.symmetric)
    text = calibration_text(whole, job)
    notes += text.notes
    for line in notes:
        say(line)
    check_room(job.out, model, grid)
    rounded, quality = _round(job, whole, text, grid)
    _write(job, whole, rounded, grid)
    if rounded.kept or rounded.costs:
        notes.append(kept_words(rounded.kept, rounded.costs, len(rounded.errors)))
        say(notes[-1])
    result = QuantizeResult(
        model=job.model,
        scheme=job.scheme,
        method=job.method,
        group=grid.group,
        out=str(job.out),
        bytes_before=2 * model.spec.parameters(),
        bytes=sum(file.stat().st_size for file in job.out.iterdir()),
        seconds=time.perf_counter() - began,
        calibration_tokens=text.calibration_BL.numel(),
        data=str(job.data or SHIPPED),
        quality=quality,
        errors=rounded.errors,
        costs=rounded.costs,
        kept=rounded.kept,
        notes=notes,
    )
    write_page(result, job.out / PAGE)
    record = msgspec.json.format(msgspec.json.encode(result))
    (job.out / RECORD).write_bytes(record + b"\n")
    return result


class CalibrationOptions(Protocol):
    """Text options that `cairn quantize` and `cairn prune` share."""

    @property
    def model(self) -> str: ...
    @property
    def data(self) -> Path | None: ...
    @property
    def judge(self) -> Path | None: ...
    @property
    def samples(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def judged(self) -> int: ...


def calibration_text(whole: Whole, job: CalibrationOptions) -> CalibrationText:
    """Windows on the model's device; the defaults depend on how fast that is."""
    if whole.tokenizer is None:
        raise ConfigError(
            f"{job.model} has no tokenizer, so that no text can calibrate it",
            hint="name a checkpoint with its tokenizer",
        )
    device = whole.model.embedding.weight.device
    many, long = ON_GPU if device.type == "cuda" else ON_CPU
    text = read_text(
        job.data,
        job.judge,
        whole.tokenizer,
        whole.model.spec.vocab,
        samples=job.samples or many,
        length=min(job.length or long, whole.model.spec.context),
        held_out=job.judged,
    )
    return text._replace(
        calibration_BL=text.calibration_BL.to(device), held_out_BL=text.held_out_BL.to(device)
    )


def check_room(out: Path, model: Transformer, grid: QuantizationGrid | None) -> None:
    """Check the free disk space before gigabytes are written."""
    spec = model.spec
    kept = spec.parameters() if grid is None else spec.vocab * spec.hidden * (2 - spec.tied)
    bits = 16 if grid is None else 9 if grid.kind in ("int8", "fp8") else 5
    needed = 2 * kept + (spec.parameters() - kept) * bits // 8
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ConfigError(
            f"{out} needs {format_bytes(needed)}, and {parent} has {format_bytes(free)} left",
            hint="make room, or choose another --out",
        )


def _check(job: QuantizeJob) -> None:
    check_out(job.out)
    if job.scheme not in SCHEMES:
        raise ConfigError(f"there is no scheme {job.scheme}", hint=f"known: {', '.join(SCHEMES)}")
    check_pair(job.scheme, job.method)
    if not job.symmetric and job.scheme != "w4a16":
        raise ConfigError(
            f"scheme {job.scheme} has no zero points", hint="--asymmetric is for --scheme w4a16"
        )
    if (job.keep or job.most_added is not None) and job.scheme in GGUF_SCHEMES:
        raise ConfigError(
            f"scheme {job.scheme} rounds all matrices",
            hint="--keep is for schemes that are written as compressed-tensors",
        )
    if job.group is not None and job.scheme != "w4a16":
        fitted(job.scheme, [], job.group)  # refuses it


def check_kept(keep: tuple[str, ...], model: Transformer) -> None:
    """Each part of a name has to be in one, or a mistake in writing would quantise what was to be kept."""
    layers = [matrices_of(layer, number) for number, layer in enumerate(model.layers)]
    names = [one.name for matrices in layers for one in matrices]
    for part in keep:
        if not any(part in name for name in names):
            raise ConfigError(
                f"--keep {part}: no matrix has that in its name",
                hint=f"names are such as {', '.join(names[:4])}",
            )
    if all(any(part in name for part in keep) for name in names):
        raise ConfigError(f"--keep {' '.join(keep)} leaves no matrix to round", hint="keep fewer")


def _round(
    job: QuantizeJob, whole: Whole, text: CalibrationText, grid: QuantizationGrid
) -> tuple[Rounded, Quality]:
    model = whole.model
    at_once = 8 if model.embedding.weight.is_cuda else 4
    reference = Reference(model, text.held_out_BL, at_once)
    settings = QuantizeSettings(
        method=job.method,
        ordered=job.ordered,
        strength=job.strength,
        keep=job.keep,
        most_added=job.most_added,
    )
    with progress(model.spec.layers, f"quantising to {job.scheme}") as advance:
        rounded = quantize_model(
            model, text.calibration_BL, grid, settings, _scale_dtype(job, whole), advance, at_once
        )
    return rounded, reference.compare(model)


def _scale_dtype(job: QuantizeJob, whole: Whole) -> torch.dtype:
    return torch.float16 if job.scheme in GGUF_SCHEMES else whole.stored


def _write(job: QuantizeJob, whole: Whole, rounded: Rounded, grid: QuantizationGrid) -> None:
    quantized = QuantizedModel(whole.model, rounded.planes, grid, whole.stored)
    if job.scheme in GGUF_SCHEMES:
        like = check_source(whole.file, whole.model.spec.family)
        write_gguf(quantized, job.out, like, job.scheme)
        return
    write_compressed_tensors(quantized, job.out, like=whole.folder)
    if whole.folder is None and whole.tokenizer is not None:
        write_tokenizer_files(whole.tokenizer, job.out)
