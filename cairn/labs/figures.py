"""How the numbers of labs are written for a person: four digits, their unit, the gap as a share; and how many held."""

from collections import Counter
from collections.abc import Sequence

from cairn.labs.entry import CheckLine, Entry
from cairn.labs.glossary import label
from cairn.labs.lab import Words


def with_unit(value: float | None, unit: str) -> Words:
    """A measured value and its unit."""
    if value is None:
        return Words("–", "–")
    words = label(unit)
    return Words(f"{figure(value)} {words.en}".rstrip(), f"{figure(value)} {words.zh}".rstrip())


def figure(value: float) -> str:
    """12,345   1,234   12.35   0.001235   1.235e-07"""
    size = abs(value)
    if value == int(value) and size < 1e12:
        return f"{int(value):,}"
    if size >= 1e12 or size < 1e-4:
        return f"{value:.4g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def shown_cell(cell: str | int | float | None) -> Words:
    if cell is None:
        return Words("–", "–")
    return label(cell) if isinstance(cell, str) else Words(figure(cell), figure(cell))


def shown_gap(gap: float | None) -> str:
    if gap is None:
        return "–"
    return f"{gap:+.0%}" if abs(gap) >= 0.005 or gap == 0 else f"{gap:+.1%}"


def kind_sign(check: CheckLine) -> str:
    """What is allowed: ±35%, at least, at most, exactly."""
    if check.kind == "near":
        return f"±{_share(check.within)}" if check.within else "="
    sign, slack = ("≥", "-") if check.kind == "at_least" else ("≤", "+")
    return f"{sign} {slack}{_share(check.within)}" if check.within else sign


def _share(within: float) -> str:
    return f"{within:.0%}" if within >= 0.01 else f"{within:.0e}"


def totals(entries: Sequence[Entry]) -> Words:
    """121 labs: 115 as predicted, 4 off, 2 skipped, 0 failed; 9:41 in all"""
    count = Counter(entry.status for entry in entries)
    minutes, seconds = divmod(round(sum(entry.seconds for entry in entries)), 60)
    return Words(
        f"{len(entries)} lab{'s' * (len(entries) != 1)}: {count['held']} as predicted, {count['off']} off, "
        f"{count['busy']} on a busy machine, "
        f"{count['skipped']} skipped, {count['failed']} failed; {minutes}:{seconds:02} in all",
        f"{len(entries)} 个实验：{count['held']} 个与预测一致，{count['off']} 个有偏差，"
        f"{count['busy']} 个因机器繁忙需重测，"
        f"{count['skipped']} 个跳过，{count['failed']} 个出错；共 {minutes} 分 {seconds:02} 秒",
    )
