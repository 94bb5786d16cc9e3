"""`cairn completion bash|zsh|fish`: what the Tab key offers, as a script for the shell.

    cairn completion bash > ~/.local/share/bash-completion/completions/cairn
    cairn completion zsh > ~/.zfunc/_cairn          a folder of fpath
    cairn completion fish > ~/.config/fish/completions/cairn.fish

The script is made from the help of every verb, once: pressing Tab starts no Python. Where no word fits, files are
offered.
"""

import contextlib
import io
import os
import re
import sys
from typing import NamedTuple

from cairn.cli import main as command_line
from cairn.core.errors import UsageError, did_you_mean
from cairn.core.prose import folded

SHELLS = ("bash", "zsh", "fish")
WIDE = "200"  # columns: no name in a help text is broken
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9.-]*")
_SUBVERBS = re.compile(r"^usage: cairn [a-z]+ ([a-z|]+\|[a-z|]+)", re.MULTILINE)
_ABOUT = re.compile(r"^  ([a-z]+)   +(\S.*)$", re.MULTILINE)


class Command(NamedTuple):
    """A verb, or a verb with its subverb; `words` are what stands behind `cairn`."""

    words: tuple[str, ...]
    about: str
    flags: tuple[str, ...]
    subverbs: tuple[str, ...] = ()


def run(args: list[str]) -> int:
    match args:
        case ["-h" | "--help"] | [_, "-h" | "--help"]:
            print(folded(__doc__), end="")
            return 0
        case [shell] if shell in SHELLS:
            print(script(shell, read_commands()), end="")
            return 0
        case [shell, extra, *_] if shell in SHELLS:
            raise UsageError(
                f"unexpected argument '{extra}'", hint=f"`cairn completion {shell}` takes none"
            )
        case [shell, *_] if not shell.startswith("-"):
            hint = did_you_mean(shell, SHELLS, otherwise=f"there are: {', '.join(SHELLS)}")
            raise UsageError(f"`cairn completion` has no '{shell}'", hint=hint)
        case [flag, *_]:
            raise UsageError(f"unknown flag '{flag}'", hint="say bash, zsh or fish")
        case _:
            raise UsageError("`cairn completion` needs a shell", hint="say bash, zsh or fish")


def script(shell: str, commands: list[Command]) -> str:
    return {"bash": bash, "zsh": zsh, "fish": fish}[shell](commands)


# -- what there is to offer -----------------------------------------------------------------------


def read_commands() -> list[Command]:
    """Every verb and subverb with its flags, as their help texts have them."""
    found = []
    for name, verb in command_line.VERBS.items():
        if name == "completion":
            found.append(Command((name,), verb.help, (), SHELLS))
            continue
        text = _help(name)
        split = _SUBVERBS.search(text)
        names = tuple(split[1].split("|")) if split else ()
        found.append(Command((name,), verb.help, flags_of(text), names))
        about = dict(_ABOUT.findall(text))
        for part in names:
            flags = flags_of(_help(name, part))
            found.append(Command((name, part), about.get(part, ""), flags))
    return found


def flags_of(help_text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_FLAG.findall(help_text)))


def _help(*words: str) -> str:
    out = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = WIDE
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            command_line.main([*words, "--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return out.getvalue()


# -- the scripts ----------------------------------------------------------------------------------


def bash(commands: list[Command]) -> str:
    cases = "\n".join(
        f'    "{" ".join(command.words)}") words="{" ".join((*command.subverbs, *command.flags))}" ;;'
        for command in commands
    )
    verbs = " ".join(_verbs(commands))
    return f"""\
# Made by `cairn completion bash`.
_cairn() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then words="{verbs} --help --version --debug"; else
  local both="${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}"
  [ "$COMP_CWORD" -eq 2 ] && both="${{COMP_WORDS[1]}}"
  case "$both" in
{cases}
    *) case "${{COMP_WORDS[1]}}" in
{_nested(commands)}
    esac ;;
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _cairn cairn
"""


def _nested(commands: list[Command]) -> str:
    """Completions after the second word of verbs without subverbs."""
    return "\n".join(
        f'      "{command.words[0]}") words="{" ".join(command.flags)}" ;;'
        for command in commands
        if len(command.words) == 1 and not command.subverbs
    )


def zsh(commands: list[Command]) -> str:
    verbs = "\n".join(
        f"    '{command.words[0]}:{_quoted(command.about)}'"
        for command in commands
        if len(command.words) == 1
    )
    cases = "\n".join(
        f'    "{" ".join(command.words)}") words=({" ".join((*command.subverbs, *command.flags))}) ;;'
        for command in commands
    )
    return f"""\
#compdef cairn
# Made by `cairn completion zsh`.
_cairn() {{
  local -a verbs
  verbs=(
{verbs}
  )
  if (( CURRENT == 2 )); then _describe 'verb' verbs; return; fi
  local both="$words[2] $words[3]" one="$words[2]"
  local -a offered
  _cairn_words "$both" || _cairn_words "$one"
  if (( CURRENT == 3 )); then _cairn_words "$one"; fi
  compadd -a offered || _files
}}
_cairn_words() {{
  local -a words
  case "$1" in
{cases}
    *) return 1 ;;
  esac
  offered=($words)
}}
# As a file of fpath this is the body of the function when Tab is first pressed, so it has to complete as well.
if [[ $funcstack[1] == _cairn ]]; then _cairn "$@"; else compdef _cairn cairn; fi
"""


def fish(commands: list[Command]) -> str:
    lines = ["# Made by `cairn completion fish`.", "complete -c cairn -n __fish_use_subcommand -f"]
    for command in commands:
        name, about = command.words[-1], _quoted(command.about)
        if len(command.words) == 1:
            lines.append(f"complete -c cairn -n __fish_use_subcommand -f -a {name} -d '{about}'")
        else:
            seen = f"__fish_seen_subcommand_from {command.words[0]}"
            lines.append(f"complete -c cairn -n '{seen}' -a {name} -d '{about}'")
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.words)
        lines += [f"complete -c cairn -n '{seen}' -l {flag[2:]}" for flag in command.flags]
        if name == "completion":
            lines.append(f"complete -c cairn -n '{seen}' -f -a '{' '.join(SHELLS)}'")
    return "\n".join(lines) + "\n"


def _verbs(commands: list[Command]) -> list[str]:
    return [command.words[0] for command in commands if len(command.words) == 1]


def _quoted(text: str) -> str:
    return text.replace("'", "’").replace(":", ",")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
