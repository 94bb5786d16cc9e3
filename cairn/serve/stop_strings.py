"""Incremental search for stop strings in a text that arrives in pieces.

    push("Hello, wor")  -> "Hello, "        "wor" may be the beginning of "world": held back
    push("ld!")         -> ""               found "world"

The first string to be complete ends the text; of several that are complete with the same character, the longest. So
the answer does not depend on how the text was cut into pieces, and whatever was given out is never taken back. Knows
nothing about tokens.
"""

from collections.abc import Sequence


class StopStrings:
    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the string that was found belongs to the text."""
        self._stops = tuple(stops)
        self.any = bool(self._stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """The text that is certain now: no stop string can begin in it."""
        if not self.any or not piece:
            return piece
        if self.found is not None:
            return ""
        text = self._held + piece
        first = self._first(text)
        if first is not None:
            start, self.found = first
            self._held = ""
            return text[: start + len(self.found)] if self._include else text[:start]
        keep = self._open_end(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def pass_over(self, piece: str) -> str:
        """A piece in which nothing is looked for."""
        return self.flush() + piece

    def flush(self) -> str:
        """Return the held-back text at the end."""
        text, self._held = self._held, ""
        return text

    def _first(self, text: str) -> tuple[int, str] | None:
        """Start and value of the first complete stop string, or None."""
        matches = [
            (at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0
        ]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _open_end(self, text: str) -> int:
        """Number of characters at the end that may begin a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
