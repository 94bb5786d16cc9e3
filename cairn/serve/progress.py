"""Progress bar of a generation with rate and ETA, on stderr if it is a terminal.

    12/64 answers  ━━━━━━━━━━━━╌╌╌╌  1,204/8,192  0:41 left  1,204 tokens/s

The bar counts tokens, because answers may all end together; one that ends early has all of its tokens behind it. The
caller says how far it is; nothing runs in the background.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cairn.report.progress import Bar

# Answers that are done, tokens that have come, and how many of the most that can come are behind us.
Show = Callable[[int, int, int], None]


@contextmanager
def answer_bar(answers: int, most_tokens: int, visible: bool) -> Iterator[Show]:
    began = time.monotonic()
    with Bar(f"0/{answers} answers", most_tokens, shown=visible) as bar:

        def show(done: int, tokens: int, passed: int) -> None:
            speed = tokens / max(time.monotonic() - began, 1e-9)
            bar.what = f"{done}/{answers} answers"
            bar.update(passed, f"{speed:,.0f} tokens/s", now=True)

        yield show
