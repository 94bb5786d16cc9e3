"""Prose as wide as the terminal: help texts (`folded`), and lines of a report (`in_terminal`).

Where the output is a pipe or a file, a line of a report stays one line, so that it can be searched.
"""

import shutil
import sys
import textwrap
from typing import TextIO


def folded(text: str) -> str:
    """Paragraphs as wide as the terminal, or 80 columns; those with indented lines stay as they are."""
    width = shutil.get_terminal_size().columns
    return "\n\n".join(
        part if "\n " in part else _fold(part, width, "") for part in text.split("\n\n")
    )


def in_terminal(text: str, indent: str = "", stream: TextIO | None = None) -> str:
    """One line, folded where the stream (stdout) is a terminal; `indent` stands before further lines."""
    out = sys.stdout if stream is None else stream
    return _fold(text, shutil.get_terminal_size().columns, indent) if out.isatty() else text


def _fold(text: str, width: int, indent: str) -> str:
    head = text[: len(text) - len(text.lstrip())]
    return head + textwrap.fill(
        text.strip(),
        width,
        initial_indent=" " * len(head),
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    ).removeprefix(" " * len(head))
