"""How far are the answers, how fast do they come, and how long will it take? A bar on stderr, if a person watches.

    12/64 answers ━━━━━━━━━━━━━━━━ 1,204 tokens/s  0:00:41 left

The bar counts tokens, because answers may all end together; one that ends early has all of its tokens behind it. The
caller says how far it is; nothing runs in the background.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Answers that are done, tokens that have come, and how many of the most that can come are behind us.
Show = Callable[[int, int, int], None]


@contextmanager
def answer_bar(answers: int, most_tokens: int, wanted: bool) -> Iterator[Show]:
    from rich.console import Console

    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield lambda done, tokens, passed: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.fields[answers]} answers"),
        BarColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        "left",
    )
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bars:
        bar = bars.add_task("", total=most_tokens, answers=f"0/{answers}", speed="")
        began = time.monotonic()

        def show(done: int, tokens: int, passed: int) -> None:
            speed = f"{tokens / max(time.monotonic() - began, 1e-9):,.0f} tokens/s"
            ready = f"{done}/{answers}"
            bars.update(bar, completed=passed, answers=ready, speed=speed, refresh=True)

        yield show
