"""The terminal of a chat: lines in, with their history; text out, dimmed or not.

    > what is a cairn?        readline: arrow keys, Ctrl-R, Tab for commands; kept in $XDG_STATE_HOME/cairn/chat_history
    thoughts are dim
    The answer is plain.

Without a terminal there are no colours and no keys. What a model says may hold any character: on a terminal those that
would move the cursor, change its title or its keys are left out. Knows nothing about models.
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from cairn.cli.chat.chat_commands import Draft

HISTORY_LINES = 2000
PROMPT, MORE = "> ", ". "
BOLD, DIM, RED, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"
# Control characters but tab and line feed; C1 ones are escape sequences in one character.
UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def history_path(env: "os._Environ[str] | dict[str, str]" = os.environ) -> Path:
    """The state folder of this user, as the XDG specification places it."""
    given = env.get("XDG_STATE_HOME", "")
    # A relative path is to be ignored, says the specification.
    state = Path(given) if Path(given).is_absolute() else Path.home() / ".local" / "state"
    return state / "cairn" / "chat_history"


class Terminal:
    """Answers go to `out`. Without a person to talk to (`once`) thoughts go nowhere, and all else to stderr."""

    def __init__(self, out: TextIO | None = None, once: bool = False) -> None:
        self.out = sys.stdout if out is None else out
        self.once = once
        self.shown = self.out.isatty()  # a person watches
        self.colours = (
            self.shown and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        )
        self._dim = False
        self._column_0 = True
        self._history: Path | None = None

    # -- out -------------------------------------------------------------------------------------

    def say(self, text: str, dim: bool = False) -> None:
        """A piece of an answer."""
        text = UNSAFE.sub("", text) if self.shown else text
        if not text or (dim and self.once):
            return
        if self._dim and not dim:  # the thought is over
            self.end_line()
            self.out.write("\n")
        if self.colours and dim and not self._dim:
            self.out.write(DIM)
        self._dim = dim
        self.out.write(text)
        self.out.flush()
        self._column_0 = text.endswith("\n")

    def end_line(self) -> None:
        """Whatever comes next begins a line."""
        if self.colours and self._dim:
            self.out.write(PLAIN)
        self._dim = False
        if not self._column_0:
            self.out.write("\n")
            self._column_0 = True
        self.out.flush()

    def note(self, text: str) -> None:
        """About the chat, and no part of it."""
        self.end_line()
        self._aside(text, DIM)

    def error(self, message: str, hint: str | None = None) -> None:
        self.end_line()
        self._aside(f"error: {message}", RED)
        if hint:
            self._aside(f"hint: {hint}", DIM)

    def _aside(self, text: str, colour: str) -> None:
        here = self.shown and not self.once
        text = UNSAFE.sub("", text)
        coloured = f"{colour}{text}{PLAIN}" if self.colours and here else text
        print(coloured, file=self.out if here else sys.stderr, flush=True)

    # -- in --------------------------------------------------------------------------------------

    def read(self) -> str | None:
        """A text, of several lines if it was typed like that; None: Ctrl-D. Raises KeyboardInterrupt."""
        self.end_line()
        draft = Draft()
        while True:
            try:
                line = self._line(MORE if draft.begun else PROMPT)
            except EOFError:
                self._column_0 = False  # the cursor stands behind the prompt
                self.end_line()
                return None
            if draft.feed(line):
                self._keep()
                return draft.text

    def _line(self, prompt: str) -> str:
        if not self.shown:  # input() would write its prompt into the answers
            print(prompt, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.removesuffix("\n")
        # readline has to know which characters take no room.
        return input(f"\x01{BOLD}\x02{prompt}\x01{PLAIN}\x02" if self.colours else prompt)

    def start_editing(self, complete: Callable[[str], list[str]]) -> str | None:
        """Keys and history; returns why there is no history, if there is none."""
        if not self.shown:
            return None
        try:
            import readline
        except ImportError:
            return "this Python has no readline: no history, no arrow keys"
        readline.set_completer_delims("")
        readline.set_completer(
            lambda begun, at: found[at] if at < len(found := complete(begun)) else None
        )
        readline.parse_and_bind("tab: complete")
        readline.set_history_length(HISTORY_LINES)
        path = history_path()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)  # chats may be private
            readline.read_history_file(path)
            readline.write_history_file(path)  # cut to its length
        except OSError as error:
            return f"the history is not kept: {error.strerror or error}"
        self._history = path
        return None

    def _keep(self) -> None:
        """Append each line to the history file immediately, so that crashes and concurrent chats lose nothing."""
        if self._history is None:
            return
        import readline

        try:
            readline.append_history_file(1, self._history)
        except OSError:  # it was there when the chat began; a chat does not end because it has gone
            self._history = None
