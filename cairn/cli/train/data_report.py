"""Output of `cairn data`: facts as lines or JSON, documents as text."""

import sys
from typing import TYPE_CHECKING, Any

import msgspec

from cairn.core.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from cairn.models.tokenizer import Tokenizer
    from cairn.train.data.tokens import Tokens


def facts(tokens: "Tokens", verified: bool) -> dict[str, Any]:
    import numpy as np

    from cairn.train.data.store import Store
    from cairn.train.data.tokens import count, documents

    lengths = np.diff(tokens.offsets)
    found: dict[str, Any] = {
        "path": str(tokens.path),
        "format": tokens.format,
        "documents": documents(tokens),
        "tokens": count(tokens),
        "shortest": int(lengths.min()) if len(lengths) else 0,
        "median": int(np.median(lengths)) if len(lengths) else 0,
        "longest": int(lengths.max(initial=0)),
        "tokenizer": tokens.tokenizer,
    }
    if isinstance(tokens, Store):
        header = tokens.header
        found |= {
            "made_with": header.made_with,
            "vocab_size": header.vocab_size,
            "dtype": header.dtype,
            "text_bytes": header.text_bytes,
            "sources": header.sources,
        }
        if header.learn:
            found["learnt"] = int(tokens.mask(0, header.tokens).sum())
        if verified:
            found["verified"] = True
    return found


def report(facts: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print(msgspec.json.encode(facts).decode())
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):<{width}}  {_shown(name, value)}")
    if facts.get("open_ends"):
        sys.stderr.write(
            f"note: {facts['open_ends']} answers have no end-of-turn token in this chat template; "
            "a model trained on them may not stop\n"
        )
    return 0


def _shown(name: str, value: Any) -> str:
    if name == "seconds":
        return format_duration(value)
    if name == "text_bytes":
        return format_bytes(value)
    if name in ("tokens", "learnt", "documents"):
        return f"{value:,} ({format_count(value)})" if value >= 10_000 else f"{value}"
    if isinstance(value, list):
        more = f" and {len(value) - 5} more" if len(value) > 5 else ""
        return ", ".join(map(str, value[:5])) + more
    return "not known" if value is None else str(value)


def print_runs(tokenizer: "Tokenizer", ids: list[int], learn: list[bool]) -> None:
    """Text by runs; what is learnt is bold and green where a terminal shows it."""
    from itertools import groupby

    from rich.console import Console
    from rich.text import Text

    shown = Text()
    for learnt, run in groupby(zip(ids, learn, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([id for id, _ in run], skip_special=False)
        shown.append(text, style="bold green" if learnt else "dim")
    Console(highlight=False, soft_wrap=True).print(shown)
