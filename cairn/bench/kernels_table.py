"""kernels.json as a Markdown table: `python -m cairn.bench.kernels_table kernels.json [docs/kernels.md]`.

With a second file the table replaces what stands there between the two marks; otherwise it is printed.
"""

import sys
from pathlib import Path

from cairn.bench.kernels import KernelReport, read
from cairn.core.errors import DataError
from cairn.core.units import format_rate
from cairn.kernels.tooling.measure import Row

BEGIN, END = "<!-- kernels table: begin -->", "<!-- kernels table: end -->"
HEADINGS = (
    "kernel",
    "shape",
    "type",
    "time",
    "TFLOP/s",
    "GB/s",
    "of ceiling",
    "anchor",
    "ratio",
    "error",
)


def markdown(report: KernelReport) -> str:
    ceiling = report.ceiling
    rates = [f"{dtype} {format_rate(rate, 'FLOP')}" for dtype, rate in ceiling.flops_per_s.items()]
    limits = ", ".join([f"copy {format_rate(ceiling.bytes_per_s, 'B')}", *rates])
    versions = ", ".join(
        f"{name} {report.versions[name]}" for name in ("torch", "triton") if name in report.versions
    )
    lines = [
        f"`{report.command}` on {report.device}, {report.date}, commit {report.commit} ({versions}).",
        f"Ceilings measured in the same run: {limits}. A ratio above 1 is faster than the anchor.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|---|---|---|" + "---:|" * 4 + "---|---:|---:|",
        *(f"| {' | '.join(_cells(row))} |" for row in report.rows),
    ]
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    head = [row.kernel, row.shape, row.dtype]
    if row.failure is not None or row.ms is None:
        return [*head, f"failed: {row.failure}".replace("|", "/"), *[""] * (len(HEADINGS) - 4)]
    micros = row.ms * 1e3
    return [
        *head,
        f"{micros:,.1f} us" if micros < 10_000 else f"{row.ms:,.2f} ms",
        f"{row.tflops:,.0f}" if row.tflops and row.tflops >= 1 else "",
        f"{row.gbps:,.0f}",
        f"{row.fraction_of_ceiling:.0%}",
        row.anchor or "",
        f"{row.ratio_to_anchor:.2f}" if row.ratio_to_anchor else "",
        f"{row.error:.0e}" if row.error is not None else "",
    ]


def insert(document: str, table: str) -> str:
    """The document with the table between its marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise DataError(
            "the document has no place for the table", hint=f"write {BEGIN} and {END} into it"
        )
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main(arguments: list[str]) -> int:
    match arguments:
        case [source]:
            print(markdown(read(Path(source))))
        case [source, target]:
            path = Path(target)
            path.write_text(insert(path.read_text(), markdown(read(Path(source)))))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
