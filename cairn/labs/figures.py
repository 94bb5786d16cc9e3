"""How the numbers of a lab are written for a person: four digits, their unit, the gap as a share."""

from cairn.labs.entry import CheckLine


def shown(value: float | None, unit: str = "") -> str:
    return f"{figure(value)} {unit}".rstrip() if value is not None else "–"


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


def shown_cell(cell: str | int | float | None) -> str:
    if cell is None:
        return "–"
    return cell if isinstance(cell, str) else figure(cell)


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
