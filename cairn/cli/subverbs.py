"""A verb that is several: `cairn kernels check` is `check` of `kernels`. Does not know what they do."""

import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

from cairn.core.errors import UsageError, did_you_mean
from cairn.core.prose import folded


class Subverb(NamedTuple):
    run: Callable[[list[str]], int]
    help: str


def dispatch(verb: str, about: str, subverbs: Mapping[str, Subverb], args: list[str]) -> int:
    """Runs the one that is named first; without a name the help is the answer, and a mistake."""
    match args:
        case []:
            print(help_text(verb, about, subverbs), end="", file=sys.stderr)
            return UsageError.exit_status
        case ["-h" | "--help", *_]:
            print(help_text(verb, about, subverbs), end="")
            return 0
        case [name, *rest] if name in subverbs:
            return subverbs[name].run(rest)
        case [name, *_]:
            hint = did_you_mean(name, subverbs, otherwise=f"there are: {', '.join(subverbs)}")
            raise UsageError(f"`cairn {verb}` has no '{name}'", hint=hint)
    raise AssertionError("unreachable: the last case takes everything")


def help_text(verb: str, about: str, subverbs: Mapping[str, Subverb]) -> str:
    width = max(map(len, subverbs))
    lines = "\n".join(f"  {name:<{width}}   {part.help}" for name, part in subverbs.items())
    usage = f"usage: cairn {verb} {'|'.join(subverbs)} [ARGUMENTS]"
    return f"{folded(about)}\n\n{usage}\n\n{lines}\n\n  cairn {verb} NAME --help   its flags\n"
