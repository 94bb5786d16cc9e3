"""Finds tool calls in what a model writes, piece by piece.

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>      Qwen, Hermes and many others;
    json      ```json {"name": "f", "arguments": {...}} ```                 of an offered tool, as Qwen-Coder writes
              <tools>{...}</tools>  {...}  {{...}}  [{...}, {...}]          them: in both formats; a bare one begins a
              <function=f>{...}</function>                                  line that stands in no other block of code
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

# json: whatever the model was taught, calls are JSON objects that name an offered tool.
ToolFormat = Literal["hermes", "llama3", "mistral", "harmony", "json"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
FENCE = "```"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS = "[TOOL_CALLS]"
_SPACE = " \t\r\n"
_TAG = r"tool_calls?|tools|function_calls?|TOOLCALL"
# Where calls may begin or end in a text, and the beginning of such a place at the end of one.
_PLACE = re.compile(rf"```|</?(?:{_TAG}|function)>|<function=|(?<=\n)[\[{{]")
_PLACE_BEGUN = re.compile(r"(?:`{1,2}|<[^<>\s]{0,16})\Z")
# What may stand in front of a call's object, and the beginning of it.
_MARK = re.compile(
    rf"[ \t\r\n]+|```(?:json|xml|tool_call|tool_code)?(?=[\s<\[{{])|<({_TAG})>|<function=([\w.\-]+)>|(\[)"
)
_MARK_BEGUN = re.compile(r"`{0,2}|```[a-z_]{0,9}|<[^<>\s]{0,140}")
_NEXT_OBJECT = re.compile(r"[,;]?[ \t\r\n]*(?=\{)")
_NEXT_OBJECT_BEGUN = re.compile(r"[,;]?[ \t\r\n]*")
_NAMED_CALL = re.compile(r"\s*([A-Za-z0-9_.\-]+)(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*(?=\{)")
_NAMED_BEGUN = re.compile(
    r"\s*[A-Za-z0-9_.\-]*(?:\[[A-Z_]*(?:\][A-Za-z0-9]*(?:\[[A-Z]*\]?)?)?)?\s*"
)
_TOOL_CALLS = re.compile(re.escape(TOOL_CALLS))
_TOOL_CALLS_BEGUN = re.compile(r"\[[A-Z_]{0,10}\Z")
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
    """Base of the format parsers: text is buffered in `_held`; a step consumes from its beginning or waits for more."""

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
        if self._step == self._in_arguments:
            self.unfinished = Unfinished(self.calls - 1, self._before + self._held)
            self._held = ""  # all of it was reported
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
        """Parse the text after a call."""
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
        """Report a delta of the current call."""
        if not self._started:
            self._started = True
            self._out.calls.append(CallDelta(self.calls, name, arguments))
            self.calls += 1
        elif arguments:
            self._out.calls.append(CallDelta(self.calls - 1, None, arguments))

    def _seek(self, place: re.Pattern[str], begun: re.Pattern[str]) -> str | None:
        """Say what comes before the first place where a call may begin; its mark, with the spaces before it.

        `begun`: what may be the beginning of one, at the end of a text.
        """
        if self._trim:
            self._held = self._held.lstrip(_SPACE)
            self._trim = not self._held
        buffer = self._held
        match = place.search(buffer)
        end = match or begun.search(buffer)
        sure = buffer[: end.start() if end else len(buffer)].rstrip(_SPACE)
        self._say(sure)
        self._held = buffer[match.end() if match else len(sure) :]
        return buffer[len(sure) : match.end()] if match else None

    def _begin_arguments(self, name: str, then: Callable[[], bool]) -> None:
        """Start a call written as a name and an object: read its arguments next, then continue with `then`."""
        self._end, self._sent, self._started, self._then = ValueEnd(0, "{"), 0, False, then
        self._report(name, "")
        self._step = self._in_arguments

    def _in_arguments(self) -> bool:
        end = self._end.find(self._held)
        self._report(None, self._held[self._sent : self._end.at])
        self._sent = self._end.at
        if end is None and not self._end.broken:
            return False
        self._held, self._trim, self._cut = self._held[self._end.at :], True, self._end.broken
        self._step = self._then
        return True


class JsonParser(ToolParser):
    """`names`: an object is a call if it names one of these; with `tagged`, behind <tool_call> whatever it names."""

    def __init__(self, names: Container[str] | None = None, tagged: bool = False) -> None:
        super().__init__()
        self._names, self._tagged = names or (), tagged
        self._fresh = True  # nothing was said since the beginning, or since a call
        self._in_code = False  # in a fenced block that is no call
        self._closing: list[str] = []  # marks that belong behind the call, the next one last
        self._brackets = ""  # that may stand behind its object

    def _content(self) -> bool:
        bare = self._held.lstrip(_SPACE)
        if not bare:
            return False
        if self._fresh and bare[0] in "[{":
            self._begin_marks(self._held[: len(self._held) - len(bare)], bare)
            return True
        place = self._seek(_PLACE, _PLACE_BEGUN)
        self._fresh = False
        if place is None:
            return False
        mark = place.lstrip(_SPACE)
        if self._closing and mark == self._closing[-1]:
            self._closing.pop()
            self._trim = True
        elif mark.startswith("</") or (self._in_code and mark in (FENCE, "{", "[")):
            self._in_code = self._in_code and mark != FENCE
            self._say(place)
        else:
            self._begin_marks(place[: -len(mark)], mark + self._held)
        return True

    def _begin_marks(self, before: str, held: str) -> None:
        self._before, self._held, self._step = before, held, self._in_marks
        self._closing, self._brackets = [], ""

    def _in_marks(self) -> bool:
        """Skip the text before an object: a fence, a tag, a list bracket, the first of two braces."""
        if self._held.startswith("{"):
            return self._in_braces()
        match = _MARK.match(self._held)
        if match is None and _MARK_BEGUN.fullmatch(self._held):
            return False
        if match is None or (match[3] and self._brackets):
            return self._no_call()
        self._before += match[0]
        self._held = self._held[match.end() :]
        if match[1]:
            self._closing.append(f"</{match[1]}>")
        elif match[2]:
            self._closing.append("</function>")
            self._function = match[2]
        elif match[3]:
            self._brackets = "]"
        elif match[0].startswith(FENCE):
            self._closing.append(FENCE)
        return True

    def _in_braces(self) -> bool:
        if self._closing and self._closing[-1] == "</function>":
            if self._function not in self._names:
                return self._no_call()
            self._begin_arguments(self._function, self._behind_call)
            return True
        inner = self._held[1:].lstrip(_SPACE)
        if not inner:
            return False
        if inner[0] == "{":
            self._before += self._held[: len(self._held) - len(inner)]
            self._held, self._brackets = inner, self._brackets + "}"
        any_name = self._tagged and self._closing[-1:] == [CLOSE] and not self._brackets
        self._begin_call(self._before, None if any_name else self._names)
        return True

    def _no_call(self) -> bool:
        if self._step == self._in_marks:
            place = _PLACE.match(self._held)  # it would be found again
            mark = place[0] if place else ""
            self._say(self._before + mark)
            self._held = self._held[len(mark) :]
            self._in_code = self._in_code or mark == FENCE
        self._in_code = self._in_code or FENCE in self._closing
        self._closing, self._fresh, self._step = [], False, self._content
        return True

    def _behind_call(self) -> bool:
        """Marks that close it, more of arguments that were cut, or another call."""
        if self._cut and self._closing:
            return self._rest_of_arguments(self._closing[-1])
        held = self._held = self._held.lstrip(_SPACE)
        if _NEXT_OBJECT_BEGUN.fullmatch(held) or _PLACE_BEGUN.fullmatch(held):
            return False
        close = self._closing[-1] if self._closing else ""
        if held[0] in self._brackets:
            self._brackets, self._held = self._brackets[: self._brackets.rfind(held[0])], held[1:]
        elif close and held.startswith(close):
            self._held = held[len(self._closing.pop()) :]
        elif match := _NEXT_OBJECT.match(held):
            self._before, self._held, self._step = match[0], held[match.end() :], self._in_marks
        else:
            self._fresh, self._step = True, self._content
        return True

    def _rest_of_arguments(self, close: str) -> bool:
        more, closed, behind = self._held.partition(close)
        if not closed:
            more = more[: len(more) - held_back(more, close)]
        self._report(None, more)
        self._held, self._cut = behind if closed else self._held[len(more) :], not closed
        if closed:
            self._closing.pop()
        return bool(closed)

    def flush(self) -> Parsed:
        if self._cut and self._closing and self._step == self._behind_call:
            self._report(None, self._held)  # what might have been the mark
            self._held = ""
        elif self._step == self._in_marks:
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
    def _content(self) -> bool:
        mark = self._seek(_TOOL_CALLS, _TOOL_CALLS_BEGUN)
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
            self._held = self._held[match.end() :]
            self._before += match[0]
            self._begin_arguments(match[1], self._content)
        elif _LIST_BEGUN.fullmatch(self._held) or _NAMED_BEGUN.fullmatch(self._held):
            return False
        else:
            self._say(self._before)
            self._step = self._content
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
        if self._step == self._behind_mark:
            self._held = self._before + self._held
        return super().flush()


def tool_parser(format: ToolFormat, names: Container[str] | None = None) -> ToolParser:
    """Create the parser of an answer."""
    match format:
        case "hermes" | "json":
            return JsonParser(names, tagged=format == "hermes")
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
