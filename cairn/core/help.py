"""Text of `cairn VERB --help`: tyro's text with a usage line that is wrapped at its flags.

    usage: cairn data tokenizer [-h] FILES --out PATH [--vocab INT] [--field STR]
           [--json | --no-json]

Knows nothing of values and where they come from.
"""

import io
import re
import shutil
import sys
from contextlib import redirect_stdout, suppress
from inspect import cleandoc
from typing import Any

import msgspec

from cairn.core.prose import folded

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_USAGE = re.compile(r"^(?:\x1b\[[0-9;]*m)*usage:.*$", re.MULTILINE)
# A flag with its brackets, or with the value behind it; or one word.
_PART = re.compile(r"\[[^\]]*\](?: \.\.\.)?|--\S+ [^\s\[-]\S*|\S+")

# Flags with a description on the same line; it goes on below, where it began.
_BEHIND_FLAG = re.compile(r"  \S.*?\s{2,}(?=\S)")
DEEP = 8  # columns, from which on a line is part of a description


class _Copy(io.StringIO):
    """Text for a terminal, if the output is one: tyro then colours it."""

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def print_help(schema: type[msgspec.Struct], prog: str, values: msgspec.Struct | None) -> None:
    """`values`: the defaults to show, where they are not those of the schema."""
    import tyro  # only a reader of the help waits for it

    defaults: dict[str, Any] = {} if values is None else {"default": values}
    copy = _Copy()
    with redirect_stdout(copy), suppress(SystemExit):  # tyro leaves once it has printed
        tyro.cli(schema, args=["--help"], prog=prog, description=" ", **defaults)
    width = shutil.get_terminal_size().columns
    print(folded(cleandoc(schema.__doc__ or "")) + "\n")  # tyro would not fold it
    shown = _USAGE.sub(lambda found: usage(found[0], prog, width), copy.getvalue(), count=1)
    print(refolded(shown, width), end="")


def refolded(text: str, width: int) -> str:
    """Descriptions of flags as wide as the terminal: tyro also breaks them where the source does."""
    lines: list[str] = []
    indent, last = 0, 0  # of the description so far; 0: there is none that goes on
    for line in text.split("\n"):
        shown = _COLOUR.sub("", line)
        begins = len(shown) - len(shown.lstrip())
        if indent and shown.strip() and begins == indent:
            for word in line.split():
                cells = len(_COLOUR.sub("", word))
                if last + 1 + cells <= width:
                    lines[-1] += f" {word}"
                    last += 1 + cells
                else:
                    lines.append(" " * indent + word)
                    last = indent + cells
            continue
        lines.append(line.rstrip())
        last = len(shown.rstrip())
        behind = _BEHIND_FLAG.match(shown)
        indent = behind.end() if behind else begins if begins >= DEEP else 0
    return "\n".join(lines)


def usage(line: str, prog: str, width: int) -> str:
    """tyro's usage line in as many lines as it needs; no flag is parted from its value."""
    text = _COLOUR.sub("", line).removeprefix(f"usage: {prog}").replace("{None}|", "")
    lines, indent = [f"usage: {prog}"], " " * len("usage: ")
    for part in _PART.findall(text):
        if len(lines[-1]) + 1 + len(part) > width:
            lines.append(indent + part)
        else:
            lines[-1] += f" {part}"
    return "\n".join(lines)
