"""All of `cairn prune`: open, check, calibrate, prune, judge, write, and the curve of what more or less would cost."""

import copy
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from cairn.compress.calibration import SHIPPED, CalibrationText
from cairn.compress.layer_by_layer import matrix_widths
from cairn.compress.open_model import Whole, check_out, open_whole
from cairn.compress.prune import Method, PrunedMatrix, Sparsity, prune_model, read_pattern
from cairn.compress.prune_experts import check_keep, fits_groups, keep_best, saliencies
from cairn.compress.quality import Quality, Reference
from cairn.compress.quantize_run import calibration_text, check_room
from cairn.core.errors import ConfigError
from cairn.core.units import format_duration
from cairn.models.export import export
from cairn.models.quantized.rounding import QuantizationGrid
from cairn.models.quantized.write import QuantizedModel, stored_tensors
from cairn.models.transformer import Transformer
from cairn.report.page import facts, heading, page, paragraph, table
from cairn.report.plot import STYLE, Series, chart
from cairn.report.progress import progress
from cairn.train.data.tokenizer_trainer import write_tokenizer_files

Say = Callable[[str], None]
PAGE, RECORD = "prune.html", "prune.json"
CURVE = (0.25, 0.5, 0.75)  # of what is asked for


class PruneJob(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a pruning run; see the flags of `cairn prune`."""

    model: str
    out: Path
    method: Method = "wanda"
    sparsity: float | None = None
    pattern: str | None = None
    experts: int | None = None  # how many of each layer stay
    curve: bool = True
    data: Path | None = None
    judge: Path | None = None
    samples: int = 0
    length: int = 0
    judged: int = 8
    dtype: str = "auto"
    device: str = "auto"


class SparsityPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Some sparsity, and what the model is like then."""

    gone: float  # share of the weights, or of the experts
    quality: Quality


class PruneResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `cairn prune`."""

    model: str
    method: str
    what: str  # "50%", "2:4", "24 of 32 experts"
    out: str
    seconds: float
    data: str
    quality: Quality
    curve: list[SparsityPoint]
    matrices: list[PrunedMatrix] = []
    notes: list[str] = []


def prune(job: PruneJob, say: Say = lambda text: None) -> PruneResult:
    began = time.perf_counter()
    _check(job)
    whole = open_whole(job.model, job.device, job.dtype)
    if job.experts is not None:
        check_keep(whole.model, job.experts)
    sparsity = _sparsity(job, whole.model)
    text = calibration_text(whole, job)
    notes = [*whole.notes, *text.notes]
    for line in notes:
        say(line)
    check_room(job.out, whole.model, None)
    reference = Reference(whole.model, text.held_out_BL)
    if job.experts is not None:
        what, method = f"{job.experts} of {_experts(whole.model)} experts", "reap"
        curve, matrices = _fewer_experts(job.experts, whole.model, text, reference, job.curve), []
    else:
        what, method = sparsity.words(), sparsity.method
        curve, matrices = _zeros(whole.model, text, reference, sparsity, job.curve)
    _write(job.out, whole)
    result = PruneResult(
        model=job.model,
        method=method,
        what=what,
        out=str(job.out),
        seconds=time.perf_counter() - began,
        data=str(job.data or SHIPPED),
        quality=curve[-1].quality,
        curve=curve,
        matrices=matrices,
        notes=notes,
    )
    (job.out / PAGE).write_text(render(result), encoding="utf-8")
    record = msgspec.json.format(msgspec.json.encode(result))
    (job.out / RECORD).write_bytes(record + b"\n")
    return result


def _check(job: PruneJob) -> None:
    check_out(job.out)
    if sum(one is not None for one in (job.sparsity, job.pattern, job.experts)) != 1:
        raise ConfigError(
            "exactly one of --sparsity, --pattern and --experts says what is removed",
            hint="such as --sparsity 0.5, --pattern 2:4, or --experts 24",
        )
    if job.sparsity is not None and not 0 < job.sparsity < 1:
        raise ConfigError(f"sparsity {job.sparsity:g} is not between 0 and 1", hint="such as 0.5")


def _sparsity(job: PruneJob, model: Transformer) -> Sparsity:
    if job.pattern is not None:
        kept, of = read_pattern(job.pattern, matrix_widths(model))
        return Sparsity(method=job.method, share=1 - kept / of, pattern=(kept, of))
    return Sparsity(method=job.method, share=job.sparsity or 0.5)


def _experts(model: Transformer) -> int:
    return model.spec.experts.count if model.spec.experts is not None else 0


def _zeros(
    model: Transformer, text: CalibrationText, reference: Reference, sparsity: Sparsity, curve: bool
) -> tuple[list[SparsityPoint], list[PrunedMatrix]]:
    """Less than is asked for, on copies; then what is asked for, on the model itself."""
    shares = [sparsity.share * part for part in CURVE] if curve and not sparsity.pattern else []
    points = []
    with progress(model.spec.layers * (len(shares) + 1), "pruning") as advance:
        for share in shares:
            trial = copy.deepcopy(model)
            prune_model(
                trial, text.calibration_BL, msgspec.structs.replace(sparsity, share=share), advance
            )
            points.append(SparsityPoint(gone=share, quality=reference.compare(trial)))
        matrices = prune_model(model, text.calibration_BL, sparsity, advance)
    points.append(SparsityPoint(gone=sparsity.share, quality=reference.compare(model)))
    return points, matrices


def _fewer_experts(
    keep: int, model: Transformer, text: CalibrationText, reference: Reference, curve: bool
) -> list[SparsityPoint]:
    found = saliencies(model, text.calibration_BL)
    experts = model.spec.experts
    assert experts is not None
    before = experts.count
    counts = {before - round((before - keep) * part) for part in CURVE} if curve else set()
    points = []
    for count in sorted(counts - {keep, before}, reverse=True):
        if not fits_groups(experts, count):
            continue
        trial = copy.deepcopy(model)
        keep_best(trial, found, count)
        points.append(SparsityPoint(gone=1 - count / before, quality=reference.compare(trial)))
    keep_best(model, found, keep)
    points.append(SparsityPoint(gone=1 - keep / before, quality=reference.compare(model)))
    return points


def _write(out: Path, whole: Whole) -> None:
    as_stored = stored_tensors(
        QuantizedModel(whole.model, {}, QuantizationGrid("int8"), whole.stored)
    )
    export(whole.model, out, like=whole.folder, stream=as_stored, dtype=whole.stored)
    if whole.folder is None and whole.tokenizer is not None:
        write_tokenizer_files(whole.tokenizer, out)


def render(result: PruneResult) -> str:
    quality = result.quality
    points = [(0.0, quality.perplexity_before)]
    points += [(point.gone, point.quality.perplexity) for point in result.curve]
    rows = [
        [
            f"{p.gone:.1%}",
            f"{p.quality.perplexity:.3f}",
            f"{p.quality.added:+.2%}",
            f"{p.quality.kl:.4f}",
            f"{p.quality.same_top:.1%}",
        ]
        for p in result.curve
    ]
    parts = [
        facts(
            {
                "pruned": f"{result.what}, {result.method}",
                "perplexity before": f"{quality.perplexity_before:.3f}",
                "perplexity": f"{quality.perplexity:.3f} ({quality.added:+.2%})",
                "took": format_duration(result.seconds),
            }
        ),
        *(paragraph(note) for note in result.notes),
        chart(
            "Perplexity", [Series(result.method, points)], x="share that is gone", y="perplexity"
        ),
        table(["gone", "perplexity", "added", "KL, nats", "same token"], rows),
    ]
    if result.matrices:
        worst = sorted(result.matrices, key=lambda one: -one.error)
        cells = [[one.matrix, f"{one.error:.4f}", f"{one.zeros:.1%}"] for one in worst]
        parts += [heading("Every matrix"), table(["matrix", "error of its output", "zeros"], cells)]
    return page(f"{result.model}: {result.what} pruned", *parts, style=STYLE)
