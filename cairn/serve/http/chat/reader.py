"""Parsing of a chat answer into reasoning, content and tool calls.

    text -ReasoningSplitter-> reasoning_content | the rest -ToolParser-> content | calls: name first, then arguments
    text of gpt-oss -Channels-> all three

Works on pieces, and the pieces that come out add up to the same message wherever the text was cut. An answer that
follows a grammar without a thought in it begins with its content, whatever that looks like.
"""

from collections.abc import Sequence
from typing import Protocol

from cairn.models.tokenizer import Tokenizer
from cairn.serve.http.chat.harmony import Channels
from cairn.serve.http.chat.reasoning import CLOSE, OPEN, ReasoningSplitter
from cairn.serve.http.chat.structure import Offer, Thinking
from cairn.serve.http.protocol.answers import (
    ChatDelta,
    ChatMessage,
    FunctionCall,
    Reason,
    ToolCall,
)
from cairn.serve.http.tools.tool_parser import (
    CallDelta,
    Parsed,
    ToolParser,
    Unfinished,
    tool_parser,
)
from cairn.serve.http.tools.tools import new_call_id


class Reader(Protocol):
    """The text of one answer, as parts of a message."""

    @property
    def passes(self) -> bool:
        """Is whatever follows content, as it is? Then it need not be pushed."""
        ...

    def push(self, text: str, ended: bool) -> list[ChatDelta]:
        """Parse a piece of text and return what is certain; `ended`: it is the last piece."""
        ...

    def reason(self, reason: Reason | None) -> Reason | None:
        """Why the message ended, given why the text did; asked after the last push."""
        ...

    @property
    def unfinished(self) -> Unfinished | None:
        """The call that was cut off with the answer; asked after the last push."""
        ...


class PlainText:
    passes = True
    unfinished = None

    def push(self, text: str, ended: bool) -> list[ChatDelta]:
        return [ChatDelta(content=text)] if text else []

    def reason(self, reason: Reason | None) -> Reason | None:
        return reason


class Calls:
    """Looks for the calls of the tools that were offered, and passes the rest on."""

    passes = False

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._parser: ToolParser = tool_parser(offer.format, offer.plan.allowed)

    def push(self, text: str, ended: bool) -> list[ChatDelta]:
        deltas = self._parts(self._parser.push(text))
        return deltas + self._parts(self._parser.flush()) if ended else deltas

    def reason(self, reason: Reason | None) -> Reason | None:
        return "tool_calls" if reason == "stop" and self._parser.calls else reason

    @property
    def unfinished(self) -> Unfinished | None:
        return self._parser.unfinished

    def _parts(self, parsed: Parsed) -> list[ChatDelta]:
        deltas = [ChatDelta(content=parsed.content)] if parsed.content else []
        return deltas + [
            ChatDelta(tool_calls=[self._call(call)])
            for call in parsed.calls
            if self._offer.plan.parallel or call.index == 0  # one was asked for: the first
        ]

    def _call(self, call: CallDelta) -> ToolCall:
        function = FunctionCall(name=call.name, arguments=call.arguments)
        if call.name is None:
            return ToolCall(index=call.index, function=function)
        id = new_call_id(self._offer.format)
        return ToolCall(index=call.index, id=id, type="function", function=function)


class Thoughts:
    """Splits off what the model thinks, and hands the rest to the next reader."""

    def __init__(self, inside: bool, rest: Reader) -> None:
        self._splitter, self._rest = ReasoningSplitter(inside), rest

    @property
    def passes(self) -> bool:
        return self._splitter.done and self._rest.passes

    def push(self, text: str, ended: bool) -> list[ChatDelta]:
        reasoning, content = self._splitter.push(text)
        if ended:
            last = self._splitter.flush()
            reasoning, content = reasoning + last.reasoning, content + last.content
        thought = [ChatDelta(reasoning_content=reasoning)] if reasoning else []
        return thought + self._rest.push(content, ended)

    def reason(self, reason: Reason | None) -> Reason | None:
        return self._rest.reason(reason)

    @property
    def unfinished(self) -> Unfinished | None:
        return self._rest.unfinished


def make_readers(offer: Offer | None, thinking: Thinking, guided: bool, count: int) -> list[Reader]:
    """Create a reader for each answer. Reasoning is parsed unless a grammar rules it out."""
    if thinking == "channels" or (offer is not None and offer.format == "harmony"):
        return [Channels(offer) for _ in range(count)]
    readers: list[Reader] = [PlainText() if offer is None else Calls(offer) for _ in range(count)]
    if guided and thinking == "no":
        return readers
    return [Thoughts(thinking == "begun", reader) for reader in readers]


def keeps_marks(
    tokenizer: Tokenizer, offer: Offer | None, thinking: Thinking, guided: bool
) -> bool:
    """Do readers look for special tokens, so that an answer's text has to have them?"""
    if thinking == "channels" or (offer is not None and offer.hidden):
        return True
    marks = {tokenizer.backend.token_to_id(mark) for mark in (OPEN, CLOSE)}
    looks = not guided or thinking != "no"
    return looks and not marks.isdisjoint(tokenizer.special_ids)


def joined(parts: Sequence[ChatDelta], unfinished: Unfinished | None = None) -> ChatMessage:
    """The parts of a whole answer as one message. A call that was cut off is text: its arguments are incomplete."""
    message = ChatMessage(content="".join(part.content or "" for part in parts))
    reasoning = "".join(part.reasoning_content or "" for part in parts)
    if reasoning:
        message.reasoning_content = reasoning
    parts_of_calls = [call for part in parts for call in part.tool_calls or ()]
    if unfinished is not None and any(call.index == unfinished.index for call in parts_of_calls):
        parts_of_calls = [call for call in parts_of_calls if call.index != unfinished.index]
        message.content = (message.content or "") + unfinished.text
    calls = _joined_calls(parts_of_calls)
    if calls:
        message.tool_calls = calls
        message.content = message.content or None
    return message


def _joined_calls(parts: Sequence[ToolCall]) -> list[ToolCall]:
    """The first part of a call has its id and its name, and all have arguments."""
    by_index: dict[int | None, tuple[ToolCall, FunctionCall]] = {}
    for part in parts:
        function = part.function or FunctionCall()
        if part.index not in by_index:
            whole = FunctionCall(name=function.name, arguments="")
            by_index[part.index] = ToolCall(id=part.id, type=part.type, function=whole), whole
        whole = by_index[part.index][1]
        whole.arguments = (whole.arguments or "") + (function.arguments or "")
    return [call for call, _ in by_index.values()]
