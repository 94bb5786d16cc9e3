"""Prose as wide as the terminal: help texts (`folded`), and lines of a report (`in_terminal`).

Where the output is a pipe or a file, a line of a report stays one line, so that it can be searched.
"""

import re
import shutil
import sys
import unicodedata
from typing import TextIO

WIDE, CLOSING = "\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef", "，。、；：？！）」』》”’"
# A word or a Chinese character, with the space before it; no line begins with the mark that closes a sentence.
PIECES = re.compile(rf"\s*(?:[{WIDE}]|[^\s{WIDE}]+)[{CLOSING}]*")


def folded(text: str) -> str:
    """Paragraphs as wide as the terminal, or 80 columns; those with indented lines stay as they are."""
    width = shutil.get_terminal_size().columns
    return "\n\n".join(
        part if "\n " in part else _fold(" ".join(part.split()), width, "")
        for part in text.split("\n\n")
    )


def in_terminal(text: str, indent: str = "", stream: TextIO | None = None) -> str:
    """Wrap a line if the stream (stdout) is a terminal; `indent` precedes the continuation lines."""
    out = sys.stdout if stream is None else stream
    return _fold(text, shutil.get_terminal_size().columns, indent) if out.isatty() else text


def _fold(text: str, width: int, indent: str) -> str:
    """No word is cut, but Chinese breaks between any two characters."""
    indent = indent if 2 * len(indent) <= width else "  "
    lines, line = [], ""
    for piece in PIECES.findall(text.rstrip()):
        if line.strip() and _cells(line) + _cells(piece) > width:
            lines.append(line)
            line = indent + piece.lstrip()
        else:
            line += piece
    return "\n".join([*lines, line])


def _cells(text: str) -> int:
    """A Chinese character is two cells wide."""
    return sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text)
