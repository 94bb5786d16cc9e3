"""Interpretation of input lines: text or commands, and the end of multi-line text.

    hello there            Say("hello there")
    /temperature 0.2       Command("temperature", "0.2")
    //etc/hosts is what?   Say("/etc/hosts is what?"): a doubled slash is a slash

    first line \\           a backslash at its end: the next line belongs to it
    \"\"\"                    opens a block of any lines; three quotes at the end of a line close it

Pure: no terminal. What the commands do is `chat_loop`'s business.
"""

from typing import Literal, NamedTuple

from cairn.cli.chat.chat_state import KNOBS
from cairn.core.errors import UsageError, did_you_mean

QUOTES = '"""'


class Say(NamedTuple):
    text: str


class Command(NamedTuple):
    name: str
    argument: str


class Known(NamedTuple):
    """A command: what follows it, and what it does."""

    takes: Literal["nothing", "maybe", "something"]
    usage: str
    help: str


KNOB_HELP = {
    "temperature": "0 always takes the most likely token; more is more varied",
    "top_p": "keep the most likely tokens that add up to this probability",
    "top_k": "keep so many of the most likely tokens",
    "min_p": "keep tokens at least this likely beside the most likely one",
    "max_tokens": "longest answer",
    "seed": "the same seed gives the same answer",
    "presence_penalty": "against words that have come up",
    "frequency_penalty": "against words that have come up often",
    "repetition_penalty": "above 1: against any repetition",
}

COMMANDS: dict[str, Known] = {
    "help": Known("nothing", "/help", "this list"),
    "system": Known("maybe", "/system [TEXT|none]", "show or set what the model is told first"),
    "set": Known("nothing", "/set", "show all parameters"),
    **{name: Known("maybe", f"/{name} [VALUE|default]", KNOB_HELP[name]) for name in KNOBS},
    "retry": Known("nothing", "/retry", "ask the last question again"),
    "undo": Known("nothing", "/undo", "forget the last question and its answer"),
    "clear": Known("nothing", "/clear", "forget everything but the system message and parameters"),
    "save": Known("something", "/save FILE", "write the chat to a file"),
    "load": Known("something", "/load FILE", "go on with a chat from a file"),
    "stats": Known("nothing", "/stats", "tokens and times of this chat"),
    "model": Known("maybe", "/model [NAME]", "show the models of the server, or choose one"),
    "quit": Known("nothing", "/quit", "leave; Ctrl-D does the same"),
}
ALIASES = {
    "?": "help",
    "h": "help",
    "exit": "quit",
    "bye": "quit",
    "q": "quit",
    "reset": "clear",
    "new": "clear",
    "regenerate": "retry",
    "tokens": "stats",
    "params": "set",
    "models": "model",
}


def parse(text: str) -> Say | Command:
    """Raises UsageError for a command that does not exist, or that lacks what it needs."""
    stripped = text.strip()
    if stripped.startswith("//"):
        return Say(stripped[1:])
    if not stripped.startswith("/"):
        return Say(stripped)
    word, _, argument = stripped[1:].partition(" ")
    word, argument = word.strip(), argument.strip()
    if "\n" in word:  # the argument is on the next line
        word, _, rest = word.partition("\n")
        argument = f"{rest} {argument}".strip()
    name = ALIASES.get(word.lower(), word.lower().replace("-", "_"))
    known = COMMANDS.get(name)
    if known is None:
        likely = did_you_mean(name, [*COMMANDS, *ALIASES], otherwise="/help lists the commands")
        raise UsageError(
            f"there is no command /{word}", hint=f"{likely}; to say it, write //{word}"
        )
    if known.takes == "something" and not argument:
        raise UsageError(f"/{name} needs something more", hint=known.usage)
    if known.takes == "nothing" and argument:
        raise UsageError(f"/{name} takes nothing, got {argument!r}", hint=known.usage)
    return Command(name, argument)


def complete(begun: str) -> list[str]:
    """Commands that begin like this, for the Tab key."""
    if not begun.startswith("/"):
        return []
    return [
        f"/{name} " if known.takes != "nothing" else f"/{name}"
        for name, known in COMMANDS.items()
        if name.startswith(begun[1:].lower())
    ]


def help_lines() -> list[str]:
    width = max(len(known.usage) for known in COMMANDS.values())
    lines = [f"  {known.usage:<{width}}   {known.help}" for known in COMMANDS.values()]
    return [
        *lines,
        "",
        '  several lines: end a line with \\, or put the text between """ and """',
        "  Ctrl-C stops an answer, Ctrl-D leaves, // at the beginning says a slash",
    ]


class Draft:
    """Lines on their way to becoming a text. `feed` until it says True; `text` is what was meant."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._block = False
        self.begun = False

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def feed(self, line: str) -> bool:
        """Return whether the text is complete."""
        if not self.begun and line.lstrip().startswith(QUOTES):
            self._block = True
            line = line.lstrip()[len(QUOTES) :]
            self.begun = True
            return self._in_block(line, first=True)
        self.begun = True
        if self._block:
            return self._in_block(line, first=False)
        if line.endswith("\\"):
            self._lines.append(line[:-1])
            return False
        self._lines.append(line)
        return True

    def _in_block(self, line: str, first: bool) -> bool:
        bare = line.rstrip()
        closed = bare.endswith(QUOTES)
        if closed:
            line = bare[: -len(QUOTES)]
        if line or not (first or closed):  # quotes on a line of their own add no empty line
            self._lines.append(line)
        return closed
