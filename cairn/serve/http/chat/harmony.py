"""Reads answers in Harmony, the format of gpt-oss: messages in channels, one behind the other.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>
    ... <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

    analysis      what the model thinks
    commentary    a call of the tool that it is sent to; without one, what the model says before a call
    final         the answer

What comes out depends on the text alone, never on where it was cut. Text that never becomes a message is content.
"""

import re

import msgspec

from cairn.serve.http.chat.reasoning import held_back
from cairn.serve.http.chat.structure import Offer
from cairn.serve.http.protocol.answers import ChatDelta, FunctionCall, Reason, ToolCall
from cairn.serve.http.tools.tool_parser import Unfinished
from cairn.serve.http.tools.tools import new_call_id

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
LONGEST_HEADER = 256  # characters: what goes on for longer without a message is text
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
FUNCTIONS = "functions."


def is_thought(header: str) -> bool:
    """Does a message with this header say what the model thinks, or what it sends to a tool that is not offered?"""
    channel = _CHANNEL.search(header)
    return _RECIPIENT.search(header) is not None or (
        channel is not None and channel[1] == "analysis"
    )


class Channels:
    """The reader of one answer; calls are looked for if tools were offered."""

    passes = False

    def __init__(self, offer: Offer | None) -> None:
        self._offer = offer
        self._held = ""  # may be the beginning of a mark
        self._header: str | None = ""  # None: inside of a message
        self._kind = ""  # of the message: reasoning, content or call
        self._last_kind = ""  # of the message before
        self._calls = 0
        self._arguments = ""  # of the last call
        self._found: list[ChatDelta] = []

    def push(self, text: str, ended: bool) -> list[ChatDelta]:
        self._held += text
        while self._step():
            pass
        if ended:
            self._take(self._held)
            self._held = ""
            if self._header and CHANNEL not in self._header:  # no message ever began
                self._say("content", self._header)
        deltas, self._found = self._found, []
        return deltas

    def reason(self, reason: Reason | None) -> Reason | None:
        return "tool_calls" if reason == "stop" and self._calls else reason

    @property
    def unfinished(self) -> Unfinished | None:
        if not self._calls:
            return None
        try:
            msgspec.json.decode(self._arguments)
        except msgspec.DecodeError:
            return Unfinished(self._calls - 1, self._arguments)
        return None

    def _step(self) -> bool:
        """Take what comes before the next mark, and the mark; False: there is none yet."""
        text = self._held
        places = [(text.find(mark), mark) for mark in MARKS if mark in text]
        if not places:
            sure = len(text) - max(held_back(text, mark) for mark in MARKS)
            self._take(text[:sure])
            self._held = text[sure:]
            return False
        at, mark = min(places)
        self._take(text[:at])
        self._held = text[at + len(mark) :]
        if mark == MESSAGE:
            self._begin()
        elif mark in (CHANNEL, CONSTRAIN):
            self._header = (self._header or "") + mark
        else:
            self._header = ""
        return True

    def _take(self, text: str) -> None:
        if self._header is None:
            self._say(self._kind, text)
            return
        self._header += text
        if len(self._header) > LONGEST_HEADER:
            header, self._header, self._kind = self._header, None, "content"
            self._say(self._kind, header)

    def _begin(self) -> None:
        """A header of the kind that its header says."""
        header, self._header = self._header or "", None
        recipient = _RECIPIENT.search(header)
        self._last_kind = self._kind
        if recipient is not None and recipient[1].startswith(FUNCTIONS) and self._offer is not None:
            self._kind = "call"
            self._begin_call(recipient[1].removeprefix(FUNCTIONS), self._offer)
        elif is_thought(header):
            self._kind = "reasoning"
        else:
            self._kind = "content"
        if self._kind == self._last_kind != "call":
            self._say(self._kind, "\n")

    def _begin_call(self, name: str, offer: Offer) -> None:
        function = FunctionCall(name=name, arguments="")
        call = ToolCall(
            index=self._calls, id=new_call_id(offer.format), type="function", function=function
        )
        self._found.append(ChatDelta(tool_calls=[call]))
        self._calls, self._arguments = self._calls + 1, ""

    def _say(self, kind: str, text: str) -> None:
        if not text:
            return
        if kind == "reasoning":
            self._found.append(ChatDelta(reasoning_content=text))
        elif kind == "call":
            self._arguments += text
            part = ToolCall(index=self._calls - 1, function=FunctionCall(arguments=text))
            self._found.append(ChatDelta(tool_calls=[part]))
        else:
            self._found.append(ChatDelta(content=text))
