"""What `cairn VERB --help` prints: tyro's text, with a usage line that is folded at its flags.

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
    print(_USAGE.sub(lambda found: usage(found[0], prog, width), copy.getvalue(), count=1), end="")


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
