"""How far is it, and how long will it take? A bar on stderr where a person watches, nothing in a log."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

Advance = Callable[[str], None]  # what has just been done


@contextmanager
def progress(total: int, what: str) -> Generator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda label: None
        return
    columns = (
        TextColumn("{task.description:<40}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    # Drawn between the steps only: a thread that redraws would run beside what is measured.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bars:
        bar = bars.add_task(what, total=total)
        bars.refresh()

        def advance(label: str) -> None:
            bars.update(bar, description=label[:40], advance=1, refresh=True)

        yield advance
