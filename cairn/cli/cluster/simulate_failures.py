"""`cairn simulate failures`: how much of the time a job of N GPUs trains. Prints; `cluster/reliability` computes."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cairn.core.config import load
from cairn.core.errors import UsageError, did_you_mean
from cairn.core.trace import make_place

if TYPE_CHECKING:
    from cairn.cluster.reliability import Outlook, RecoveryScheme
    from cairn.cluster.reliability_monte_carlo import Lived
    from cairn.cluster.reliability_published import Checked

SIZES = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 100_000, 131_072)


class SimulateFailures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """MTTF, effective training time (ETTR) and goodput of a large job, by checkpoint scheme.

    Schemes: sync, async, memory, per-step. Exact renewal model, and a Monte Carlo beside it.
    """

    gpus: int = 16_384
    """of the job"""
    scheme: str = "all"
    """names with commas, or all"""
    rate: str = "rsc-1"
    """failures per node and day: rsc-1, rsc-2, llama-3, or a number such as 0.0065"""
    gpus_per_node: int = 8
    """a failure takes a node"""
    write: float | None = None
    """seconds a checkpoint stops training, instead of the scheme's"""
    detect: float | None = None
    """seconds until a failure is known, instead of the scheme's"""
    restart: float | None = None
    """seconds from then to the next step, instead of the scheme's"""
    interval: float | None = None
    """seconds of work between checkpoints; by default the best"""
    draws: int = 200_000
    """failures of the Monte Carlo"""
    shape: float = 1.0
    """Weibull shape of the Monte Carlo: 1 is without memory, below 1 failures come in bursts"""
    html: Path | None = None
    """write one self-contained page to this file"""
    json: bool = False
    """print one JSON document"""


def run(args: list[str]) -> int:
    options = load(SimulateFailures, args=args, env_prefix="CAIRN_SIMULATE_FAILURES_").value
    from cairn.cluster import reliability_page
    from cairn.cluster.reliability import mttf, outlook
    from cairn.cluster.reliability_monte_carlo import live
    from cairn.cluster.reliability_published import checks, expected_interruptions

    rate, schemes = _rate(options.rate), _schemes(options)
    _check(options)
    make_place(options.html, "--html")

    def of(gpus: int, scheme: "RecoveryScheme") -> "Outlook":
        return outlook(
            gpus, scheme, rate, interval=options.interval, gpus_per_node=options.gpus_per_node
        )

    mean = mttf(options.gpus, rate, options.gpus_per_node)
    now: list[tuple[Outlook, Lived]] = []
    for scheme in schemes:
        found = of(options.gpus, scheme)
        now.append(
            (found, live(mean, scheme, found.interval, failures=options.draws, shape=options.shape))
        )
    sweep = {scheme.name: [of(gpus, scheme) for gpus in SIZES] for scheme in schemes}
    checked = checks()
    if options.html is not None:
        expected = expected_interruptions(options.gpus, 30)
        text = reliability_page.render(options.gpus, options.rate, now, sweep, checked, expected)
        options.html.write_text(text, encoding="utf-8")
        print(f"wrote {options.html}", file=sys.stderr)
    if options.json:
        document = {
            "gpus": options.gpus,
            "rate_per_node_day": rate,
            "mttf_s": mean,
            "schemes": [
                {**msgspec.to_builtins(o), "monte_carlo": msgspec.to_builtins(m)} for o, m in now
            ],
            "sweep": sweep,
            "published": [{**msgspec.to_builtins(row), "error": row.error} for row in checked],
        }
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
        return 0
    _print(options, now, sweep)
    _print_published(checked)
    return 0


def _rate(text: str) -> float:
    from cairn.cluster.reliability import RATES

    if text in RATES:
        return RATES[text]
    try:
        value = float(text)
    except ValueError:
        known = list(RATES)
        raise UsageError(
            f"no failure rate '{text}'",
            hint=did_you_mean(
                text, known, f"there are {', '.join(known)}; or a number, such as 0.0065"
            ),
        ) from None
    if not 0 < value < 1_000:
        raise UsageError(f"--rate is {text}", hint="failures of one node a day, such as 0.0065")
    return value


def _schemes(options: SimulateFailures) -> "list[RecoveryScheme]":
    from cairn.cluster.reliability import SCHEMES

    asked = SCHEMES if options.scheme == "all" else map(str.strip, options.scheme.split(","))
    names = list(dict.fromkeys(asked))
    changed = {
        name: value
        for name in ("write", "detect", "restart")
        if (value := getattr(options, name)) is not None
    }
    found = []
    for name in names:
        if name not in SCHEMES:
            hint = did_you_mean(name, SCHEMES, f"there are: {', '.join(SCHEMES)}")
            raise UsageError(f"no scheme '{name}'", hint=hint)
        found.append(msgspec.structs.replace(SCHEMES[name], **changed))
    return found


def _check(options: SimulateFailures) -> None:
    for name, least, most in (
        ("gpus", 1, 10_000_000),
        ("gpus_per_node", 1, 1024),
        ("draws", 40, 10_000_000),
    ):
        if not least <= getattr(options, name) <= most:
            value = getattr(options, name)
            raise UsageError(
                f"--{name.replace('_', '-')} is {value}", hint=f"{least:,} to {most:,}"
            )
    if not 0.2 <= options.shape <= 10:
        raise UsageError(f"--shape is {options.shape}", hint="0.2 to 10; 1 is without memory")


def _print(
    options: SimulateFailures,
    now: "list[tuple[Outlook, Lived]]",
    sweep: "dict[str, list[Outlook]]",
) -> None:
    from cairn.cli.columns import lines
    from cairn.cluster.reliability_page import HEADINGS, cells
    from cairn.core.units import format_duration

    first = now[0][0]
    print(
        f"{options.gpus:,} GPUs fail every {format_duration(first.mttf)} "
        f"({first.failures_per_day:.1f} times a day, rate {options.rate})\n"
    )
    print("\n".join(lines(HEADINGS, [cells(outlook, lived) for outlook, lived in now])))
    print("\nETTR by size of the job")
    rows = [
        [f"{row[0].gpus:,}", format_duration(row[0].mttf), *(f"{one.ettr:.3f}" for one in row)]
        for row in zip(*sweep.values(), strict=True)
    ]
    print("\n".join(lines(["GPUs", "MTTF", *sweep], rows)))


def _print_published(checked: "list[Checked]") -> None:
    """Print the deviation of the failure model from published data."""
    from cairn.cli.columns import lines

    print("\nPublished beside predicted")
    rows = [_published(row) for row in checked]
    print("\n".join(lines(["what", "published", "predicted", "error", ""], rows, left=(0, 4))))


def _published(row: "Checked") -> list[str]:
    figures = [f"{value:.4g} {row.unit}".strip() for value in (row.published, row.predicted)]
    return [row.what, *figures, f"{row.error:+.1%}", row.note]
