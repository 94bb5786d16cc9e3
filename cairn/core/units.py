"""Formatting and parsing of quantities with units: 80 GiB, 4.2 TB/s, 3.4 ms, 7.6B.

    bytes      parse_bytes("80GiB")                 format_bytes(85899345920)       80 GiB
    rates      parse_rate("4.2 TB/s", "B")          format_rate(4.2e12, "B")        4.2 TB/s
               parse_rate("989 TFLOP/s", "FLOP")    format_rate(9.89e14, "FLOP")    989 TFLOP/s
    durations  parse_duration("2m 05s")             format_duration(125)            2m 05s
    counts     parse_count("7.6B")                  format_count(7_600_000_000)     7.6B

What is printed has four significant digits at most, and reading it back and printing it again
changes nothing. K, M, G alone mean two things for bytes and are refused. Knows no configuration and
no terminal.
"""

import math
import re
from fractions import Fraction
from typing import Literal

from cairn.core.errors import ConfigError, closest

RateUnit = Literal["B", "FLOP"]

_NUMBER = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(\S*)\s*")
_PART_OF_DURATION = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([^\s0-9.]+)")

# Largest first, so that printing takes the first one that fits.
_DECIMAL = {"E": 10**18, "P": 10**15, "T": 10**12, "G": 10**9, "M": 10**6, "k": 10**3, "": 1}
_BINARY = {f"{p}i" if p else "": 1024 ** (6 - i) for i, p in enumerate([*"EPTGMK", ""])}
_DECIMAL_BYTES = {f"{prefix}B": factor for prefix, factor in _DECIMAL.items()}
_BINARY_BYTES = {f"{prefix}B": factor for prefix, factor in _BINARY.items()}
_COUNTS = {"T": 10**12, "B": 10**9, "M": 10**6, "k": 10**3, "": 1}
_SECONDS = {
    "d": Fraction(86400),
    "h": Fraction(3600),
    "m": Fraction(60),
    "s": Fraction(1),
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    "ns": Fraction(1, 10**9),
}


def parse_bytes(text: str) -> int:
    """Bytes in "80GiB", "1.2 GB" or "512" (a bare number is bytes), rounded to a whole byte."""
    units = {**_DECIMAL_BYTES, **_BINARY_BYTES, "KB": 10**3, "": 1}
    return _nearest(_parse(text, units, what="size", example="80GiB or 1.2GB"))


def format_bytes(count: float, base: Literal["binary", "decimal"] = "binary") -> str:
    """80 GiB; with base="decimal", 85.9 GB."""
    return _format(count, _BINARY_BYTES if base == "binary" else _DECIMAL_BYTES, space=" ")


def parse_rate(text: str, unit: RateUnit) -> float:
    """Per second: bytes in "4.2 TB/s", operations in "989 TFLOP/s" (also written "989 TFLOPS")."""
    units = {f"{name}/s": factor for name, factor in _rate_units(unit).items()}
    if unit == "FLOP":
        units |= {f"{prefix}FLOPS": factor for prefix, factor in _DECIMAL.items()}
        return float(_parse(text, units, what="rate", example="989 TFLOP/s"))
    units |= {f"{name}/s": factor for name, factor in _BINARY_BYTES.items()} | {"KB/s": 10**3}
    return float(_parse(text, units, what="rate", example="4.2 TB/s"))


def format_rate(per_second: float, unit: RateUnit) -> str:
    """4.2 TB/s or 989 TFLOP/s."""
    return _format(per_second, _rate_units(unit), space=" ") + "/s"


def parse_count(text: str) -> int:
    """Parse a count such as "7.6B", "128k" or "32768"; suffixes are powers of 1,000."""
    units = {**_COUNTS, "K": 10**3}
    return _nearest(_parse(text, units, what="count", example="7.6B, 128k or 32768"))


def format_count(count: float) -> str:
    """7.6B, 128k, 32.77k, 512."""
    return _format(count, _COUNTS, space="")


def parse_duration(text: str) -> float:
    """Seconds in "12 us", "3.4 ms", "2m 05s", "1h 30m"; a bare number is refused, except 0."""
    hint = "write a number and a unit, such as 250us, 3.4ms, 90s or 2m 05s"
    parts = list(_PART_OF_DURATION.finditer(text))
    if text.strip() == "0":
        return 0.0
    if not parts or "".join(part.group() for part in parts) != text.rstrip():
        raise ConfigError(f"cannot read the duration {text!r}", hint=hint)
    total = Fraction(0)
    smallest = Fraction(10**9)
    for part in parts:
        seconds = _SECONDS.get(part[2].replace("µ", "u").replace("μ", "u"))
        if seconds is None:
            raise ConfigError(f"unknown unit {part[2]!r} in the duration {text!r}", hint=hint)
        if seconds >= smallest:
            raise ConfigError(
                f"the duration {text!r} does not go from large units to small", hint=hint
            )
        smallest = seconds
        total += Fraction(part[1]) * seconds
    return float(total)


def format_duration(seconds: float) -> str:
    """12 us, 3.4 ms, 2m 05s, 1h 02m, 3d 04h: one unit below a minute, two above."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 59.995:  # what would print as "60 s" is a minute
        small = {name: float(_SECONDS[name]) for name in ("s", "ms", "us", "ns")}
        return _format(seconds, small, space=" ")
    for large, small, step in (("m", "s", 60), ("h", "m", 60), ("d", "h", 24)):
        count = round(seconds / float(_SECONDS[small]))
        if count < step * step or large == "d":
            return f"{count // step}{large} {count % step:02d}{small}"
    raise AssertionError("unreachable: days have no upper end")


def _rate_units(unit: RateUnit) -> dict[str, int]:
    return {f"{prefix}{unit}": factor for prefix, factor in _DECIMAL.items()}


def _parse(text: str, units: dict[str, int], *, what: str, example: str) -> Fraction:
    """The number times its unit, exactly; a float in between would make 1.1 GB miss a byte."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ConfigError(f"cannot read the {what} {text!r}", hint=f"write it like {example}")
    number, unit = match.groups()
    if unit not in units:
        lowered = {name.lower(): name for name in units}
        meant = lowered.get(unit.lower()) or closest(unit, units)
        if unit in ("K", "M", "G", "T") and what == "size":
            hint = (
                f"write {number}{unit}B for powers of 1000 or {number}{unit}iB for powers of 1024"
            )
        elif meant:
            hint = f"did you mean '{number} {meant}'?"
        else:
            hint = f"write it like {example}"
        problem = f"unknown unit {unit!r} in" if unit else "no unit in"
        raise ConfigError(f"{problem} the {what} {text!r}", hint=hint)
    return Fraction(number) * units[unit]


def _nearest(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))


def _format(value: float, units: dict[str, int] | dict[str, float], *, space: str) -> str:
    if not math.isfinite(value):
        return f"{value}{space}{next(reversed(units))}"
    if value < 0:
        return "-" + _format(-value, units, space=space)
    for unit, factor in units.items():
        # 999.96 MB has to become 1 GB and not 1000 MB, so the choice is made on the rounded number.
        if value and float(f"{value / factor:.4g}") >= 1:
            return f"{_digits(value / factor)}{space}{unit}"
    unit, factor = next(reversed(units.items()))
    return f"{_digits(value / factor)}{space}{unit}"


def _digits(value: float) -> str:
    """Four significant digits without an exponent and without trailing zeros."""
    if value >= 1000:
        return str(round(value))
    return f"{float(f'{value:.4g}'):.9f}".rstrip("0").rstrip(".")
