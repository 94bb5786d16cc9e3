"""How many bytes are through, how fast, and how long the rest will take. A bar on stderr where a person watches."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

Advance = Callable[[int], None]  # bytes that have just been read

REDRAW_S = 0.1


@contextmanager
def byte_progress(total: int, what: str) -> Generator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda count: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bars:
        bar = bars.add_task(what, total=total)
        bars.refresh()
        drawn = time.monotonic()

        def advance(count: int) -> None:
            nonlocal drawn
            now = time.monotonic()
            bars.update(bar, advance=count, refresh=now - drawn > REDRAW_S)
            drawn = now if now - drawn > REDRAW_S else drawn

        yield advance
