"""Parses a command line into one raw value per setting, and reports mistakes in the words that were typed.

    --top-p 0.9   --top-p=0.9   --top_p 0.9      one value
    --json   --no-json                           a switch
    --stop a b   --stop a --stop b               a list
    MODEL                                        a positional argument; some of them also as a flag (`AlsoFlag`)
    --                                           everything after it is positional

The forms are the ones that tyro prints under --help, and that is what tyro is for here: its own
parser answers a mistake with a box and the end of the process, and does not tell which flags were
given. Knows names and words only: whether "abc" is a number is decided by `schema`.
"""

import re
from collections import deque
from collections.abc import Sequence

import msgspec

from cairn.core.errors import UsageError, closest
from cairn.core.schema import Leaf

# A value may begin with a dash, as -1 or "- item" do; a flag goes on with a letter and no spaces.
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*(=.*)?", re.DOTALL)


class Word(msgspec.Struct, frozen=True):
    """The raw value of one leaf on the command line, and the name under which it stood."""

    raw: str | bool | list[str]
    name: str  # "--top-p", or "MODEL" for a positional argument


class Flag(msgspec.Struct, frozen=True):
    """The setting that a command-line name refers to."""

    leaf: Leaf
    switch: bool | None = None  # what a bare --x or --no-x says


def asks_for(args: Sequence[str], *names: str) -> bool:
    """Return whether one of the names appears before `--`. --help is answered before any error is reported."""
    before = args[: args.index("--")] if "--" in args else args
    return any(name in before for name in names)


def flag_name(leaf: Leaf) -> str:
    """The command-line name of a setting: --optim.lr, or MODEL for a positional argument."""
    if leaf.positional:
        # Brackets say in the help that it may be left out.
        return (leaf.metavar or leaf.key.upper()).strip("[]").removesuffix(" ...")
    return "--" + leaf.key.replace("_", "-")


def read_flags(leaves: list[Leaf], args: Sequence[str], prog: str) -> dict[str, Word]:
    """The words given for each leaf, by key."""
    flags = _names(leaves)
    tokens, positionals = deque(args), []
    words: dict[str, Word] = {}
    while tokens:
        token = tokens.popleft()
        if token == "--":
            positionals += tokens
            break
        if not _FLAG.fullmatch(token):
            positionals.append(token)
            continue
        written, equals, attached = token.partition("=")
        name = written.replace("_", "-")
        if name not in flags:
            raise _unknown(written, attached if equals else None, tokens, flags, prog)
        flag = flags[name]
        raw = _take(flag, written, attached if equals else None, tokens)
        if flag.leaf.values is None and flag.leaf.key in words:  # a list goes on where it stopped
            raw = [*_words(words[flag.leaf.key].raw), *_words(raw)]
        words[flag.leaf.key] = Word(raw, name)
    placed = _positionals([one for one in leaves if one.key not in words], positionals, prog)
    return words | placed


def _names(leaves: list[Leaf]) -> dict[str, Flag]:
    names: dict[str, Flag] = {}
    for leaf in leaves:
        own = leaf.aliases if leaf.positional else (flag_name(leaf), *leaf.aliases)
        if leaf.values != 0:
            names |= {name: Flag(leaf) for name in own}
            continue
        names |= {name: Flag(leaf, switch=True) for name in own}
        names[_opposite(leaf)] = Flag(leaf, switch=False)
    return names


def _opposite(leaf: Leaf) -> str:
    """--no-json for --json, --optim.no-fused for --optim.fused."""
    table, dot, name = flag_name(leaf)[2:].rpartition(".")
    return f"--{table}{dot}no-{name}"


def _take(
    flag: Flag, name: str, attached: str | None, tokens: deque[str]
) -> str | bool | list[str]:
    """Removes the flag's values from the tokens; a list takes what comes until the next flag."""
    leaf = flag.leaf
    if flag.switch is not None:
        if attached is None:
            return flag.switch
        raise UsageError(
            f"{name} takes no value, got {attached!r}",
            hint=f"write {flag_name(leaf)} or {_opposite(leaf)} alone",
        )
    values = [] if attached is None else [attached]
    while (
        (leaf.values is None and attached is None) or len(values) < (leaf.values or 0)
    ) and _is_value(tokens):
        values.append(tokens.popleft())
    if leaf.values is None:
        return values
    if len(values) < leaf.values:
        needed = "a value" if leaf.values == 1 else f"{leaf.values} values, got {len(values)}"
        dashed = tokens and tokens[0].startswith("-")
        hint = f"a value that begins with a dash is written {name}={tokens[0]}" if dashed else None
        raise UsageError(f"{name} needs {needed}", hint=hint)
    return values[0] if leaf.values == 1 else values


def _words(raw: str | bool | list[str]) -> list[str]:
    return raw if isinstance(raw, list) else [str(raw)]


def _is_value(tokens: deque[str]) -> bool:
    return bool(tokens) and tokens[0] != "--" and not _FLAG.fullmatch(tokens[0])


def _unknown(
    name: str, attached: str | None, tokens: deque[str], flags: dict[str, Flag], prog: str
) -> UsageError:
    value = attached if attached is not None else tokens[0] if _is_value(tokens) else None
    bare = {known_name.lstrip("-"): known_name for known_name in flags}
    match = closest(name.lstrip("-").replace("_", "-"), bare)
    return UsageError(
        f"unknown flag {name!r}" + (f" (value {value!r})" if value is not None else ""),
        hint=f"did you mean {bare[match]!r}?" if match else f"`{prog} --help` lists the flags",
    )


def _positionals(leaves: list[Leaf], words: list[str], prog: str) -> dict[str, Word]:
    placed: dict[str, Word] = {}
    rest = list(words)
    positionals = [leaf for leaf in leaves if leaf.positional]
    for leaf in positionals:
        if rest and leaf.values is None:
            placed[leaf.key] = Word(rest, flag_name(leaf))
            rest = []
        elif rest and leaf.values == 1:
            placed[leaf.key] = Word(rest.pop(0), flag_name(leaf))
    if rest:
        hint = _what_it_takes(leaves, positionals, prog)
        raise UsageError(f"unexpected argument {rest[0]!r}", hint=hint)
    return placed


def _what_it_takes(leaves: list[Leaf], positionals: list[Leaf], prog: str) -> str:
    takes = " ".join(flag_name(leaf) for leaf in positionals)
    if any(leaf.key == "prompt" and not leaf.positional for leaf in leaves):
        return f"`{prog}` takes {takes}; a text goes behind --prompt, in quotes"
    if takes:
        return f"`{prog}` takes {takes}; quote text that has spaces"
    return f"`{prog}` takes flags only; see `{prog} --help`"
