"""Finds tool calls in what a model writes, piece by piece.

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>      Qwen, Hermes and many others;
              ```json {"name": "f", "arguments": {...}} ```                 as Qwen-Coder writes them
    llama3    {"name": "f", "parameters": {...}}; {...}                     also behind <|python_tag|>
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]          or [TOOL_CALLS]f[ARGS]{...}
    harmony   messages in channels, of which a call is one: they are read by `chat.harmony`

What comes out is a function of the text alone, wherever it was cut: content, and calls whose name comes first and whose
arguments follow in parts, in the model's own characters. What looks like a call and turns out to be none, before its
arguments have begun, is content, mark and all. Arguments that stop being JSON half way are handed on as they are: their
beginning is with the client already. Spaces around calls belong to them.
"""

import re
from collections.abc import Callable, Container, Iterable
from typing import Literal, NamedTuple

import msgspec

from cairn.serve.http.chat.reasoning import held_back
from cairn.serve.http.tools.call_object import CallObject, ValueEnd

ToolFormat = Literal["hermes", "llama3", "mistral", "harmony"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
FENCE = "```"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS = "[TOOL_CALLS]"
_SPACE = " \t\r\n"
_FENCED_CALL = re.compile(r"(?:json|tool_call)?\s*(?=\{)")
_FENCE_BEGUN = re.compile(r"[a-z_]{0,9}\s*")
_NAMED_CALL = re.compile(r"\s*([A-Za-z0-9_.\-]+)(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*(?=\{)")
_NAMED_BEGUN = re.compile(
    r"\s*[A-Za-z0-9_.\-]*(?:\[[A-Z_]*(?:\][A-Za-z0-9]*(?:\[[A-Z]*\]?)?)?)?\s*"
)
_FIRST_OF_LIST = re.compile(r"\s*(?:\[\s*)?(?=\{)")
_LIST_BEGUN = re.compile(r"\s*(?:\[\s*)?")
_NEXT_OF_LIST = re.compile(r"\s*,\s*(?=\{)")
_NEXT_BEGUN = re.compile(r"\s*(?:,\s*)?")


class CallDelta(msgspec.Struct, frozen=True):
    index: int
    name: str | None  # in the first delta of a call, and in no other
    arguments: str


class Unfinished(NamedTuple):
    """A call whose arguments never ended, since the answer did."""

    index: int
    text: str  # as the model wrote it, mark and all


class Parsed(msgspec.Struct):
    content: str = ""
    calls: list[CallDelta] = []


class ToolParser:
    """What the formats share: text goes through `_held`; a step reads from its beginning, or waits for more."""

    SEPARATORS = _SPACE  # between calls; nothing that is worth saying

    def __init__(self) -> None:
        self.calls = 0  # that were found so far
        self.unfinished: Unfinished | None = None  # known at the end
        self._held = ""
        self._out = Parsed()
        self._step: Callable[[], bool] = self._content  # False: it waits
        self._call: CallObject | None = None
        self._before = ""  # what becomes content with a call that is none
        self._started = False  # the call that is being read was announced
        self._cut = False  # the one before it ended in the middle of its arguments
        self._trim = False  # right behind a call

    def push(self, text: str) -> Parsed:
        self._held += text
        while self._step():
            pass
        return self._taken()

    def flush(self) -> Parsed:
        """The text has ended: what was held back is what it is."""
        call, self._call = self._call, None
        if call is not None and not call.announced:
            self._say(self._before + call.text)
        elif call is not None and call.cut:
            self.unfinished = Unfinished(self.calls - 1, self._before + call.text)
        if not (self.calls and not self._held.strip(self.SEPARATORS)):
            self._say(self._held)
        self._held = ""
        return self._taken()

    def _content(self) -> bool:
        raise NotImplementedError

    def _behind_call(self) -> bool:
        """After one that was a call, however it ended."""
        raise NotImplementedError

    def _say(self, text: str) -> None:
        self._out.content += text

    def _taken(self) -> Parsed:
        taken, self._out = self._out, Parsed()
        return taken

    def _begin_call(self, before: str, names: Container[str] | None = None) -> None:
        self._call, self._before, self._started = CallObject(names), before, False
        self._step = self._in_call

    def _in_call(self) -> bool:
        call = self._call
        assert call is not None
        call.push(self._held)
        self._held = ""
        if call.announced:
            self._report(call.name, call.take())
        if not call.over:
            return False
        self._call, self._held = None, call.text[call.at :]
        if call.announced:
            self._trim, self._cut = True, call.cut
            self._step = self._behind_call
        else:
            self._say(self._before + call.text[: call.at])
            self._step = self._no_call
        return True

    def _no_call(self) -> bool:
        self._step = self._content
        return True

    def _report(self, name: str | None, arguments: str) -> None:
        """Of the call that is being read."""
        if not self._started:
            self._started = True
            self._out.calls.append(CallDelta(self.calls, name, arguments))
            self.calls += 1
        elif arguments:
            self._out.calls.append(CallDelta(self.calls - 1, None, arguments))

    def _seek(self, *marks: str) -> str | None:
        """Say what comes before the first mark; that mark, with the spaces before it, when it is there."""
        if self._trim:
            self._held = self._held.lstrip(_SPACE)
            self._trim = not self._held
        buffer, places = self._held, [(self._held.find(mark), mark) for mark in marks]
        at, first_mark = min(
            ((at, mark) for at, mark in places if at >= 0), default=(len(buffer), "")
        )
        text = buffer[:at]
        if not first_mark:
            text = buffer[: len(buffer) - max(held_back(buffer, mark) for mark in marks)]
        sure = text.rstrip(_SPACE)
        self._say(sure)
        self._held = buffer[at + len(first_mark) :] if first_mark else buffer[len(sure) :]
        return text[len(sure) :] + first_mark if first_mark else None


class HermesParser(ToolParser):
    """`names`: a fenced JSON object is a call only if it names one of these."""

    def __init__(self, names: Container[str] | None = None) -> None:
        super().__init__()
        self._names = names
        self._close = CLOSE

    def _content(self) -> bool:
        mark = self._seek(OPEN) if self._names is None else self._seek(OPEN, FENCE)
        if mark is None:
            return False
        self._close = CLOSE
        if mark.endswith(OPEN):
            self._begin_call(mark)
        else:
            self._before, self._step = mark, self._behind_fence
        return True

    def _behind_fence(self) -> bool:
        if match := _FENCED_CALL.match(self._held):
            self._held, self._close = self._held[match.end() :], FENCE
            self._begin_call(self._before + match[0], self._names)
        elif _FENCE_BEGUN.fullmatch(self._held):
            return False
        else:  # a block of code
            self._say(self._before)
            self._step = self._content
        return True

    def _behind_call(self) -> bool:
        """Up to the closing mark: more of arguments that were cut, or spaces; another call may come without it."""
        if self._cut:
            more, closed, behind = self._held.partition(self._close)
            if not closed:
                more = more[: len(more) - held_back(more, self._close)]
            self._report(None, more)
            self._held = behind if closed else self._held[len(more) :]
        else:
            closed = self._close in self._held or OPEN in self._held
            junk, _, behind = self._held.partition(self._close)
            if closed and OPEN in junk:
                self._held = self._held.lstrip(_SPACE)
            elif closed:
                self._say(junk.strip(_SPACE))
                self._held = behind
        if closed:
            self._step = self._content
        return bool(closed)

    def flush(self) -> Parsed:
        if self._cut and self._step == self._behind_call:
            self._report(None, self._held)  # what might have been the mark
            self._held = ""
        elif self._step == self._behind_fence:
            self._held = self._before + self._held
        return super().flush()


class Llama3Parser(ToolParser):
    """`names`: a JSON object is a call only if it names one of these; None: whatever it names."""

    SEPARATORS = _SPACE + ";,"

    def __init__(self, names: Container[str] | None = None) -> None:
        super().__init__()
        self._names = names

    def _content(self) -> bool:
        return self._try_call(_SPACE)

    def _behind_call(self) -> bool:
        return self._try_call(self.SEPARATORS)

    def _try_call(self, skipped: str) -> bool:
        bare = self._held.lstrip(skipped)
        behind = bare.removeprefix(PYTHON_TAG).lstrip(_SPACE)
        if behind.startswith("{"):
            self._begin_call(self._held[: len(self._held) - len(behind)], self._names)
            self._held = behind
            return True
        if behind and not PYTHON_TAG.startswith(bare):
            self._step = self._plain
            return True
        return False

    def _no_call(self) -> bool:
        self._step = self._plain
        return True

    def _plain(self) -> bool:
        self._say(self._held)
        self._held = ""
        return False


class MistralParser(ToolParser):
    def __init__(self) -> None:
        super().__init__()
        self._end, self._sent = ValueEnd(0, "{"), 0  # of arguments that follow a bare name

    def _content(self) -> bool:
        mark = self._seek(TOOL_CALLS)
        if mark is None:
            return False
        self._before = mark
        self._step = self._behind_mark
        return True

    def _behind_mark(self) -> bool:
        if match := _FIRST_OF_LIST.match(self._held):
            self._held = self._held[match.end() :]
            self._begin_call(self._before + match[0])
        elif match := _NAMED_CALL.match(self._held):
            self._held, self._sent = self._held[match.end() :], 0
            self._end, self._started = ValueEnd(0, "{"), False
            self._before += match[0]
            self._report(match[1], "")
            self._step = self._in_arguments
        elif _LIST_BEGUN.fullmatch(self._held) or _NAMED_BEGUN.fullmatch(self._held):
            return False
        else:
            self._say(self._before)
            self._step = self._content
        return True

    def _in_arguments(self) -> bool:
        """Of a call that is written as a name and an object."""
        end = self._end.find(self._held)
        self._report(None, self._held[self._sent : self._end.at])
        self._sent = self._end.at
        if end is None and not self._end.broken:
            return False
        self._held, self._trim, self._step = self._held[self._end.at :], True, self._content
        return True

    def _behind_call(self) -> bool:
        if match := _NEXT_OF_LIST.match(self._held):
            self._held = self._held[match.end() :]
            self._begin_call(match[0])
            return True
        if _NEXT_BEGUN.fullmatch(self._held):
            return False
        bare = self._held.lstrip(_SPACE)
        self._held = bare.removeprefix("]")
        self._step = self._content
        return True

    def flush(self) -> Parsed:
        if self._step == self._in_arguments:
            self.unfinished = Unfinished(self.calls - 1, self._before + self._held)
            self._held = ""  # all of it was reported
        elif self._step == self._behind_mark:
            self._held = self._before + self._held
        return super().flush()


def tool_parser(format: ToolFormat, names: Container[str] | None = None) -> ToolParser:
    """For one answer."""
    match format:
        case "hermes":
            return HermesParser(names)
        case "llama3":
            return Llama3Parser(names)
        case "mistral":
            return MistralParser()
        case "harmony":
            raise ValueError("calls in channels are read with the channels: chat.harmony")


def parse_all(parser: ToolParser, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and the calls as (name, arguments): what the deltas add up to."""
    content, calls = "", []
    for parsed in (*map(parser.push, pieces), parser.flush()):
        content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                calls.append((delta.name, ""))
            name, arguments = calls[delta.index]
            calls[delta.index] = (name, arguments + delta.arguments)
    return content, calls
