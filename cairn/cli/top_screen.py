"""Screen of `cairn top`: text from the documents of a server. Pure.

model, status, rates      batch and pages as bars       latency      keys      the newest requests
"""

from typing import Any

from cairn.core.units import format_duration

Document = dict[str, Any]
BAR = 30
NAMES = {"anybody": "(no key)"}
SHORTEST = 24  # lines that a terminal has at least
WIDEST_ID = 24  # as the server makes them


def screen(
    engine: Document, usage: Document, requests: list[Document], width: int = 80, height: int = 24
) -> list[str]:
    """Render at most `height` lines of at most `width` characters."""
    head = [*_head(engine, usage, width), *_bars(engine), *_latency(engine), _floor(engine), ""]
    keys = _keys(usage["keys"])
    rest = max(height - len(head), 4)
    shown_keys = keys[: max(min(len(keys), rest // 3), 2)]
    lines = [*head, *shown_keys, "", *_requests(requests)]
    return [line[:width] for line in lines[:height]]


def _head(engine: Document, usage: Document, width: int) -> list[str]:
    rate, model = engine["rate"], engine["model"]
    state = (
        f"  {engine['status']}  {engine['running']} running  {engine['waiting']} waiting  "
        f"{engine['preempted']} preempted"
    )
    room = max(width - len(state), 8)
    shown = model if len(model) <= room else f"{model[: room - 3]}..."
    return [
        shown + state,
        f"tokens/s  output {rate['output_tokens_per_s']:,.0f}  prompt {rate['prompt_tokens_per_s']:,.0f}   "
        f"loop lag {_time(usage['event_loop_lag_s'])}   energy {_energy(usage)}",
    ]


def _energy(usage: Document) -> str:
    """Since the server started."""
    found = [key["joules"] for key in usage["keys"] if key["joules"] is not None]
    joules = sum(found) + (usage["idle_joules"] or 0.0)
    return f"{joules / 1e3:,.1f} kJ" if found or usage["idle_joules"] else "not known"


def _bars(engine: Document) -> list[str]:
    pages, batch, prefix = engine["pages"], engine["batch"], engine["prefix"]
    total = max(pages["total"], 1)
    held = f"{pages['used']} in use, {pages['cached']} cached, of {pages['total']}"
    tokens = batch["decode_tokens"] + batch["prefill_tokens"]
    looked = prefix["looked_up_tokens"]
    share = prefix["hit_tokens"] / looked if looked else 0.0
    return [
        f"KV pages  {_bar(pages['used'] / total, pages['cached'] / total)} {held}",
        f"batch     {_bar(tokens / max(batch['budget_tokens'], 1))} {batch['decode_tokens']} decode + "
        f"{batch['prefill_tokens']} prefill tokens",
        f"prefix    {_bar(share)} {share:.0%} of {looked:,} prompt tokens cached",
    ]


def _bar(share: float, more: float = 0.0) -> str:
    full = round(min(max(share, 0.0), 1.0) * BAR)
    half = min(round(max(more, 0.0) * BAR), BAR - full)
    return "[" + "#" * full + ":" * half + "." * (BAR - full - half) + "]"


def _latency(engine: Document) -> list[str]:
    found = []
    for name, label in (("ttft_s", "TTFT"), ("itl_s", "ITL"), ("e2e_s", "total")):
        middle, late = (_short(engine["latency"][name][p]) for p in ("p50", "p99"))
        found.append(f"{label} {middle}/{late}")
    return ["p50/p99   " + "  ".join(found)]  # so short that all of it fits into 80 columns


def _floor(engine: Document) -> str:
    """The newest steps beside what this machine needs for them at least."""
    known = [step for step in engine["recent"] if step["floor_s"]]
    if not known:
        return "limit     not known yet (`cairn calibrate` measures it)"
    took, least = sum(s["total_s"] for s in known), sum(s["floor_s"] for s in known)
    limits = [step["limited_by"] for step in known if step["limited_by"]]
    by = f" (bound by {max(set(limits), key=limits.count)})" if limits else ""
    return f"limit     a step takes {_short(took / len(known))}, the hardware needs {_short(least / len(known))}{by}"


def _keys(keys: list[Document]) -> list[str]:
    names = ("requests", "prompt", "cached", "output", "device", "left today")
    widths = (8, 10, 10, 10, 9, 11)
    headings = (f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    lines = [" ".join([f"{'key':<12}", *headings])]
    for key in sorted(keys, key=lambda one: -one["device_s"]):
        name = NAMES.get(key["key"], key["key"])
        left = "-" if key["today_left"] is None else f"{key['today_left']:,}"
        lines.append(
            f"{name[:12]:<12} {key['requests']:>8,} {key['prompt_tokens']:>10,} {key['cached_tokens']:>10,} "
            f"{key['output_tokens']:>10,} {_time(key['device_s']):>9} {left:>11}"
        )
    return lines


def _requests(requests: list[Document]) -> list[str]:
    lines = [
        f"{'request':<{WIDEST_ID}} {'status':<7} {'in':>5} {'out':>5} {'TTFT':>6} {'total':>6} "
        f"{'cached':>6} why no more"
    ]
    for one in requests:
        lines.append(
            f"{one['id'][:WIDEST_ID]:<{WIDEST_ID}} {one['status'][:7]:<7} {one['prompt_tokens']:>5} "
            f"{one['output_tokens']:>5} {_short(one['ttft_s']):>6} {_short(one['e2e_s']):>6} "
            f"{one['cached_tokens']:>6} {one.get('cache_miss') or ''}"
        )
    return lines


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)


def _short(seconds: float | None) -> str:
    """Format a duration in at most six characters."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{1e3 * seconds:.3g}ms" if seconds < 0.0995 else f"{1e3 * seconds:.0f}ms"
    return f"{seconds:.3g}s" if seconds < 999.5 else f"{seconds / 60:.0f}min"
