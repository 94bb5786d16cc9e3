"""Reads one tool call, `{"name": "f", "arguments": {...}}`, while it is still being written.

    push('{"name": "f", "argu')  push('ments": {"x"')  push(': 1}}')        name f, then arguments {"x" and : 1}

Looks at each character once, so what it knows depends on the text and not on where it was cut. The arguments are the
model's own characters, spaces and all. Checks as much of JSON as it takes to find the end of a value: brackets and
strings. Says where the text stopped being a call; knows nothing about the marks around one.
"""

import re
from collections.abc import Container
from typing import Literal

import msgspec

ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", "type", "id", *ARGUMENTS)
_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR_END = re.compile(r"[,}\]\s]")
_PAIRS = {"}": "{", "]": "["}

# done: the object is closed. failed: this is no call, or if it was announced, no JSON any longer.
State = Literal["open", "first", "key", "colon", "value", "inside", "next", "done", "failed"]


class ValueEnd:
    """Finds the end of a JSON value."""

    def __init__(self, start: int, first: str) -> None:
        self.at = start  # looked at so far
        self.broken = False  # a bracket that closes nothing: there is no end
        self._scalar = first not in '"{['
        self._open: list[str] = []
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """End of the value, or None if it is incomplete."""
        if self._scalar:
            end = _SCALAR_END.search(text, self.at)
            self.at = end.start() if end else len(text)
            return self.at if end else None
        while self.at < len(text) and not self.broken:
            if self._step(text):
                return self.at
        return None

    def _step(self, text: str) -> bool:
        """Past the next character that matters. True: the value ends with it."""
        if self._escaped:
            self._escaped = False
            self.at += 1
            return False
        match = (_INSIDE if self._in_string else _OUTSIDE).search(text, self.at)
        if match is None:
            self.at = len(text)
            return False
        self.at = match.end()
        match match[0]:
            case "\\":
                self._escaped = True
            case '"':
                self._in_string = not self._in_string
            case "{" | "[" as opened:
                self._open.append(opened)
            case closed:
                self.broken = not self._open or self._open.pop() != _PAIRS[closed]
                self.at -= self.broken  # it is no part of the value
        return not (self._open or self._in_string or self._escaped or self.broken)


class CallObject:
    """Incremental parser of a tool call, which is reported when its name is known and its arguments have begun."""

    def __init__(self, names: Container[str] | None = None) -> None:
        self.text = ""  # all that was pushed
        self.at = 0  # how much of it was read
        self.state: State = "open"
        self.name: str | None = None
        self.announced = False
        self._names = names  # None: any name is one
        self._key, self._is_key = "", False
        self._end: ValueEnd | None = None
        self._value = 0  # where the value begins that is being read
        self._from: int | None = None  # where arguments begin that are an object
        self._stop: int | None = None  # and where they end
        self._sent = 0  # up to where they were taken
        self._decoded: str | None = None  # arguments that were spelled otherwise

    @property
    def over(self) -> bool:
        return self.state in ("done", "failed")

    @property
    def cut(self) -> bool:
        """Its arguments have no end."""
        return self.announced and self._from is not None and self._stop is None

    def push(self, text: str) -> None:
        self.text += text
        while not self.over and self._read():
            pass

    def take(self) -> str:
        """The arguments, as far as they have come and were not taken before."""
        if not self.announced:
            return ""
        if self._decoded is not None:
            taken, self._decoded = self._decoded, ""
            return taken
        if self._from is None:
            return ""
        start = max(self._sent, self._from)
        self._sent = self.at if self._stop is None else self._stop
        return self.text[start : self._sent]

    def _read(self) -> bool:
        """The next thing; False: it is not there yet."""
        if self.state == "inside":
            return self._read_value()
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at
        if self.at == len(self.text):
            return False
        char = self.text[self.at]
        following = _GRAMMAR.get((self.state, char))
        if self.state == "value" or (self.state in ("first", "key") and char == '"'):
            self._is_key = self.state != "value"
            self.state, self._value = "inside", self.at
            self._end = ValueEnd(self.at, char)
            if not self._is_key and self._key in ARGUMENTS and char == "{" and self._from is None:
                self._from = self.at
                self._announce()
            return True
        if following is None:
            self.state = "failed"
            return False
        self.at += 1
        self.state = following
        if following == "done":
            self._close()
        return True

    def _read_value(self) -> bool:
        assert self._end is not None
        end = self._end.find(self.text)
        self.at = self._end.at
        if self._end.broken:
            self.state = "failed"
            return False
        if end is None:
            return False
        raw = self.text[self._value : end]
        if self._is_key:
            self._key, self.state = str(_decoded(raw)), "colon"
            if self._key not in KEYS and not self.announced:
                self.state = "failed"
        else:
            self.state = "next"
            self._take_in(raw, end)
        return self.state != "failed"

    def _take_in(self, raw: str, end: int) -> None:
        if self._key == "name" and self.name is None:
            name = _decoded(raw)
            if not isinstance(name, str) or not name or not self._known(name):
                self.state = "failed"
                return
            self.name = name
            self._announce()
        elif self._key in ARGUMENTS and self._from == self._value:
            self._stop = end
        elif self._key in ARGUMENTS and self._from is None and self._decoded is None:
            value = _decoded(raw)
            if value is None and raw == "null":
                value = "{}"
            if not isinstance(value, str):  # a number or a list: nothing that a function takes
                self.state = "failed"
                return
            self._decoded = value
            self._announce()

    def _known(self, name: str) -> bool:
        return self._names is None or name in self._names

    def _announce(self) -> None:
        begun = self._from is not None or self._decoded is not None
        self.announced = self.announced or (self.name is not None and begun)

    def _close(self) -> None:
        if self.name is None:
            self.state = "failed"
        elif not self.announced:  # a function without arguments
            self._decoded, self.announced = "{}", True


_GRAMMAR: dict[tuple[str, str], State] = {
    ("open", "{"): "first",
    ("first", "}"): "done",
    ("colon", ":"): "value",
    ("next", ","): "key",
    ("next", "}"): "done",
}


def _decoded(raw: str) -> object:
    try:
        return msgspec.json.decode(raw.encode())
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
