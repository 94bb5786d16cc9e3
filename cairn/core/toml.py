"""A TOML file as values with line numbers, and a configuration Struct as a TOML file.

Reading is the standard library's; it forgets on which line a key stood, so `read` looks that up
again. Does not know which keys are right: that is decided by `config`.
"""

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from cairn.core.errors import ConfigError, did_you_mean
from cairn.core.schema import flatten, leaves, plain_value

_TABLE = re.compile(r"\s*\[\s*([\w.\"' -]+?)\s*\]\s*(#.*)?")
_KEY = re.compile(r"\s*([\w.\"' -]+?)\s*=")
_POSITION = re.compile(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)")


class TomlDocument(msgspec.Struct, frozen=True):
    """The values of a file and their lines."""

    path: Path
    values: dict[str, Any]
    lines: dict[
        str, int
    ]  # dotted key -> line; a key inside { } or a multi-line value may be missing

    def where(self, key: str) -> str:
        """The place of a key for a message: "run.toml line 12"."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.path} line {self.lines[key]}" if key else str(self.path)


def read(path: Path) -> TomlDocument:
    """The file's values; every way in which it cannot be read is a ConfigError."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        others = [other.name for other in path.parent.glob("*.toml")]
        hint = did_you_mean(
            path.name, others, otherwise="check the path; it is relative to the folder you are in"
        )
        raise ConfigError(f"no such file: {path}", hint=hint) from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a folder, not a TOML file", hint="name the file in it"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start})", hint="TOML files are UTF-8"
        ) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"cannot read {path}: {reason}", hint="check the file's owner and mode"
        ) from None
    return TomlDocument(path=path, values=_parse(path, text), lines=_lines(text))


def render(config: msgspec.Struct) -> str:
    """The Struct as TOML that reads back as the same Struct; None is a key left out."""
    tables: dict[str, list[str]] = {"": []}
    defaults = {leaf.key: leaf.default for leaf in leaves(type(config))}
    for key, value in flatten(config).items():
        table, _, name = key.rpartition(".")
        if value is not None:
            tables.setdefault(table, []).append(f"{name} = {render_value(value)}")
        elif defaults[key] is not None:
            raise ConfigError(
                f"{key} is none, which TOML cannot say", hint="none is the same as a key left out"
            )
    parts = [([f"[{table}]"] if table else []) + lines for table, lines in tables.items()]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def render_value(value: object) -> str:
    """Render a value as TOML on one line; None, which TOML lacks, as none."""
    match plain_value(value):
        case None:
            return "none"
        case bool(flag):
            return "true" if flag else "false"
        case str(text):  # a JSON string is a TOML string but for one control character
            return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
        case float(number) if not math.isfinite(number):
            return str(number)
        case list() | tuple() as items:
            return "[" + ", ".join(render_value(item) for item in items) + "]"
        case number:
            return repr(number)


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _POSITION.fullmatch(str(error))
        what, line, column = match.groups() if match else (str(error), None, None)
        if line is None:  # "at end of document"
            line, column = text.count("\n") + 1, len(text) - text.rfind("\n")
        raise ConfigError(
            f"{path} line {line}, column {column}: {what[0].lower()}{what[1:]}",
            hint=_syntax_hint(path, what),
        ) from None


def _syntax_hint(path: Path, what: str) -> str:
    if path.suffix != ".toml":
        return f"settings are TOML, and {path.name} may be no such file"
    if what.startswith(("Cannot overwrite", "Cannot declare")):
        return "the file has this name already; leave one of them out"
    return 'text is written in quotes, "like this"; lists like [1, 2]; tables like [optim]'


def _lines(text: str) -> dict[str, int]:
    """The line of each key, found by `[table]` and `key =` at the beginning of lines."""
    lines: dict[str, int] = {}
    prefix, open_quote = "", None
    for number, line in enumerate(text.split("\n"), start=1):
        if open_quote is None and (table := _TABLE.fullmatch(line)):
            prefix = _bare(table[1]) + "."
            lines.setdefault(prefix[:-1], number)
        elif open_quote is None and (key := _KEY.match(line)):
            lines.setdefault(prefix + _bare(key[1]), number)
        for quote in ('"""', "'''"):  # the inside of a multi-line text is not TOML
            if open_quote in (None, quote) and line.count(quote) % 2:
                open_quote = None if open_quote else quote
    return lines


def _bare(key: str) -> str:
    return ".".join(part.strip(" \"'") for part in key.split("."))
