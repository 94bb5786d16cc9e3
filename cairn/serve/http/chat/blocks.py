"""An answer as blocks one behind the other, for interfaces that give a single answer: /v1/messages, /v1/responses.

    text of the answer -Reader-> parts of a message -Blocks-> thought | text | tool call, each begun, continued, ended

What becomes of a `Block` is written by those endpoints, in the terms of their protocols.
"""

from typing import Literal, NamedTuple

import msgspec

from cairn.serve.answer import CompletionOutput
from cairn.serve.http.chat.reader import Reader
from cairn.serve.http.protocol.answers import ChatDelta, Reason, reason_of

Kind = Literal["thought", "text", "call"]


class Block(msgspec.Struct, kw_only=True):
    """A part of the answer that is one thing; `text` grows."""

    index: int
    kind: Kind
    text: str = ""  # of a call: its arguments
    id: str = ""  # of a call
    name: str = ""  # of the tool that is called


class Change(NamedTuple):
    what: Literal["begin", "more", "end"]
    block: Block
    text: str = ""  # what is new


class Blocks:
    """An answer while it grows, as blocks one behind the other. There is always at least one."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._call: int | None = None  # of the block that is open: which of the reader's calls
        self.all: list[Block] = []

    def push(self, delta: CompletionOutput) -> list[Change]:
        changes: list[Change] = []
        for part in self._reader.push(delta.text, delta.finished):
            self._add(part, changes)
        if delta.finished:
            if not self.all:
                self._begin(Block(index=0, kind="text"), changes)
            changes.append(Change("end", self.all[-1]))
        return changes

    def whole(self) -> list[Block]:
        """All blocks of an answer that has ended. A call that was cut off is text: its arguments are incomplete."""
        unfinished = self._reader.unfinished
        if unfinished is None or self.all[-1].kind != "call":
            return self.all
        return [*self.all[:-1], Block(index=len(self.all) - 1, kind="text", text=unfinished.text)]

    @property
    def thought(self) -> str:
        """All that the model thought."""
        return "".join(block.text for block in self.all if block.kind == "thought")

    def reason(self, delta: CompletionOutput) -> Reason | None:
        return self._reader.reason(reason_of(delta))

    def _add(self, part: ChatDelta, changes: list[Change]) -> None:
        if part.reasoning_content:
            self._add_text("thought", part.reasoning_content, changes)
        if part.content:
            self._add_text("text", part.content, changes)
        for call in part.tool_calls or ():
            function = call.function
            if function is None:
                continue
            if call.index != self._call or call.id is not None:
                block = Block(
                    index=len(self.all), kind="call", id=call.id or "", name=function.name or ""
                )
                self._begin(block, changes)
                self._call = call.index
            self._more(function.arguments or "", changes)

    def _add_text(self, kind: Kind, text: str, changes: list[Change]) -> None:
        if not self.all or self.all[-1].kind != kind:
            self._begin(Block(index=len(self.all), kind=kind), changes)
        self._more(text, changes)

    def _begin(self, block: Block, changes: list[Change]) -> None:
        if self.all:
            changes.append(Change("end", self.all[-1]))
        self._call = None
        self.all.append(block)
        changes.append(Change("begin", block))

    def _more(self, text: str, changes: list[Change]) -> None:
        if text:
            self.all[-1].text += text
            changes.append(Change("more", self.all[-1], text))
