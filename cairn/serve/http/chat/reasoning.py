"""Splits what a model thinks from what it says: `<think> ... </think> answer`.

    push("<thi")  push("nk>\\nHm, ")  push("yes.</th")  push("ink>\\n\\nYes")     thought: Hm, yes.  said: Yes

A block is looked for at the beginning of an answer only. Where the template has opened it already, the answer begins
inside. The spaces around the two parts belong to the marks and go with them. Whatever is pushed comes out as soon as
it is certain, and never depends on where the text was cut. Knows no tokens.
"""

from typing import Literal, NamedTuple

OPEN, CLOSE = "<think>", "</think>"
_SPACE = " \t\r\n"


class Split(NamedTuple):
    reasoning: str
    content: str


def opened_by(prompt: str, mark: str = OPEN) -> bool:
    """Does the prompt end inside a block that the template has opened?"""
    return prompt.rstrip().endswith(mark)


def held_back(text: str, mark: str) -> int:
    """Number of characters at the end of `text` that may begin the marker."""
    for count in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-count:]):
            return count
    return 0


class ReasoningSplitter:
    """Splits an answer into reasoning and content. `inside`: the template has opened the reasoning block."""

    def __init__(self, inside: bool = False, marks: tuple[str, str] = (OPEN, CLOSE)) -> None:
        self._open, self._close = marks
        self._inside = inside
        # begin: a mark may come. trim: only spaces so far. content: nothing is looked for any more.
        self._state: Literal["begin", "trim", "reasoning", "gap", "content"] = "begin"
        self._held = ""

    @property
    def done(self) -> bool:
        """Is all that follows content?"""
        return self._state == "content" and not self._held

    def push(self, text: str) -> Split:
        self._held += text
        reasoning, content = "", ""
        while True:
            before = self._state
            part = self._step()
            if before in ("begin", "content", "gap"):
                content += part
            else:
                reasoning += part
            if self._state == before:
                return Split(reasoning, content)

    def flush(self) -> Split:
        """The text has ended."""
        rest, self._held = self._held, ""
        if self._state == "reasoning":
            return Split(rest.rstrip(_SPACE), "")
        if self._state == "trim" or (self._state == "begin" and self._inside):
            return Split(rest.strip(_SPACE), "")
        return Split("", "" if self._state == "gap" else rest)

    def _step(self) -> str:
        match self._state:
            case "begin":
                return self._begin()
            case "trim" | "gap":
                self._held = self._held.lstrip(_SPACE)
                if self._held:
                    self._state = "reasoning" if self._state == "trim" else "content"
                return ""
            case "reasoning":
                return self._think()
            case _:
                text, self._held = self._held, ""
                return text

    def _begin(self) -> str:
        bare = self._held.lstrip(_SPACE)
        if bare.startswith(
            self._open
        ):  # also where the template has opened it, and the model again
            self._held, self._state = bare[len(self._open) :], "trim"
        elif not self._open.startswith(bare):
            self._state = "trim" if self._inside else "content"
        return ""

    def _think(self) -> str:
        thought, mark, behind = self._held.partition(self._close)
        if mark:
            self._held, self._state = behind, "gap"
            return thought.rstrip(_SPACE)
        # Spaces are held back together with what may be the mark: they go with it if it comes.
        certain = thought[: len(thought) - held_back(thought, self._close)].rstrip(_SPACE)
        self._held = thought[len(certain) :]
        return certain


def split_reasoning(text: str, inside: bool = False) -> Split:
    """A whole answer at once."""
    splitter = ReasoningSplitter(inside)
    first, last = splitter.push(text), splitter.flush()
    return Split(first.reasoning + last.reasoning, first.content + last.content)
