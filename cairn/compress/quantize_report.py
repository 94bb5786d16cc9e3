"""A quantised model on a page: what it lost, which matrices lost most, and how the errors are distributed."""

from pathlib import Path

import msgspec

from cairn.compress.quality import Quality
from cairn.compress.quantize import MatrixError
from cairn.compress.sensitivity import MatrixCost
from cairn.core.units import format_bytes, format_duration
from cairn.report.page import facts, heading, page, paragraph, table
from cairn.report.plot import STYLE, Series, chart

BINS = 24


class QuantizeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `cairn quantize`."""

    model: str
    scheme: str
    method: str
    group: int  # weights that share a scale; 0: a row
    out: str
    bytes_before: int  # of all weights in 16 bits
    bytes: int  # of the folder or file
    seconds: float
    calibration_tokens: int
    data: str
    quality: Quality
    errors: list[MatrixError]
    costs: list[MatrixCost] = []  # where it was measured which matrices to keep
    kept: list[str] = []  # matrices in 16 bits
    notes: list[str] = []


def kept_words(kept: list[str], costs: list[MatrixCost], rounded: int) -> str:
    """Describe the matrices that stay in 16 bits, with their size and benefit."""
    if not costs:
        return f"in 16 bits: {', '.join(kept)}"
    more = sum(one.bytes for one in costs if one.kept)
    nats = sum(one.nats for one in costs)
    left = sum(one.nats for one in costs if not one.kept)
    return (
        f"{len(kept)} of {rounded} matrices stay in 16 bits, which takes {format_bytes(more)} more: the divergence "
        f"expected of the others is {left:.4f} nats, of all {nats:.4f}"
    )


def write_page(result: QuantizeResult, path: Path) -> None:
    path.write_text(render(result), encoding="utf-8")


def render(result: QuantizeResult) -> str:
    quality = result.quality
    parts = [
        facts(
            {
                "scheme": f"{result.scheme}, {result.method}",
                "size": f"{format_bytes(result.bytes)} (16 bits: {format_bytes(result.bytes_before)})",
                "perplexity before": f"{quality.perplexity_before:.3f}",
                "perplexity": f"{quality.perplexity:.3f} ({quality.added:+.2%})",
                "KL from the original": f"{quality.kl:.4f} nats a token",
                "same most likely token": f"{quality.same_top:.1%}",
                "took": format_duration(result.seconds),
            }
        ),
        paragraph(
            f"Calibrated with {result.calibration_tokens:,} tokens of {result.data}, judged with "
            f"{quality.tokens:,} others. Errors are |error| / |output| of a product on rows of the calibration text."
        ),
        *(paragraph(note) for note in result.notes),
        heading("Error along the layers"),
        _along_layers(result.errors),
        heading("Distribution of the errors"),
        _distribution(result.errors, result.method),
        heading("Every matrix"),
        _every(result.errors),
    ]
    if result.costs:
        parts += [heading("What each matrix costs"), _costs(result.costs)]
    return page(f"{result.model}: {result.scheme}", *parts, style=STYLE)


def _along_layers(errors: list[MatrixError]) -> str:
    kinds: dict[str, list[tuple[float, float]]] = {}
    for one in errors:
        _, number, rest = one.matrix.split(".", 2)
        words = [word for word in rest.split(".") if not word.isdigit()]
        kinds.setdefault(".".join(words), []).append((float(number), one.error))
    lines = [
        Series(name, points, "dots" if len(points) > len({x for x, _ in points}) else "line")
        for name, points in kinds.items()
    ]
    return chart("Relative error of each matrix's output", lines, x="layer", y="error")


def _distribution(errors: list[MatrixError], method: str) -> str:
    both = {"round to nearest": [one.nearest for one in errors]}
    if method != "rtn":
        both[method] = [one.error for one in errors]
    top = max(max(values) for values in both.values()) or 1.0
    lines = [Series(name, _histogram(values, top), "steps") for name, values in both.items()]
    return chart("How many matrices have which error", lines, x="relative error", y="matrices")


def _histogram(values: list[float], top: float) -> list[tuple[float, float]]:
    counts = [0] * (BINS + 1)
    for value in values:
        counts[min(int(value / top * BINS), BINS)] += 1
    return [(place * top / BINS, float(count)) for place, count in enumerate(counts)]


def _costs(costs: list[MatrixCost]) -> str:
    worst = sorted(costs, key=lambda one: -one.nats)
    rows = [
        [one.matrix, f"{one.nats:.6f}", format_bytes(one.bytes), "16 bits" if one.kept else ""]
        for one in worst
    ]
    return table(["matrix", "KL, nats a token", "bytes more in 16 bits", "kept"], rows)


def _every(errors: list[MatrixError]) -> str:
    worst = sorted(errors, key=lambda one: -one.error)
    rows = [
        [one.matrix, f"{one.error:.5f}", f"{one.nearest:.5f}", f"{one.error / one.nearest:.3f}"]
        for one in worst
        if one.nearest > 0
    ]
    return table(["matrix", "error", "round to nearest", "ratio"], rows)
