"""Grammars in llama.cpp's notation (GBNF), as the Lark grammars that llguidance reads.

    root ::= "no" | number ("," ws number){0,2}        ->    start: ("n" "o") | rule_1 ("," rule_2 rule_1){0,2}
    number ::= [0-9]+                                        rule_1: /[\\x{30}-\\x{39}]/+

Every terminal is one character. A longer one would match greedily, as lexers do: `[a-z]* "x"` could never end, and
`("a" | "ab") .` would not take "ab". Knows no tokens; what is wrong is said with its line.
"""

import re
from typing import NoReturn

from cairn.core.errors import RequestError, did_you_mean
from cairn.serve.structured_output import literal

DEEPEST = 64  # groups within groups
ANY_CHARACTER = "/(?s:.)/"
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:\s|#[^\r\n]*)*")
_DEFINES = re.compile(r"[ \t]*::=")
_TIMES = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d+)?\s*)?\}")


def lark_of(grammar: str, field: str) -> str:
    """The same language in Lark's notation; RequestError says what is wrong with the grammar, and in which line."""
    return _Translation(grammar, field).translated()


class _Translation:
    """Single-pass translator; `at` is the read position."""

    def __init__(self, text: str, field: str) -> None:
        self.text, self.field, self.at = text, field, 0
        self.depth = 0
        self.numbers: dict[str, int] = {}  # of rules, in the order in which they are met
        self.mentioned: dict[str, int] = {}  # where a rule is first used
        self.bodies: dict[str, str] = {}

    def translated(self) -> str:
        self._skip(lines=True)
        while self.at < len(self.text):
            name = self._name("a rule's name")
            if not (defines := _DEFINES.match(self.text, self.at)):
                self._fail(f"'::=' has to follow the name {name!r}")
            self.at = defines.end()
            if name in self.bodies:
                self._fail(f"the rule {name!r} is defined twice")
            self._skip(lines=True)
            self.bodies[name] = self._alternatives(nested=False)
            self._end_of_rule()
        self._check_names()
        return "\n".join(f"{self._lark_name(name)}: {body}" for name, body in self.bodies.items())

    # -- parts of a rule -------------------------------------------------------------------------

    def _alternatives(self, nested: bool) -> str:
        alternatives = [self._sequence(nested)]
        while self._next() == "|":
            self.at += 1
            self._skip(lines=True)
            alternatives.append(self._sequence(nested))
        return " | ".join(alternatives)

    def _sequence(self, nested: bool) -> str:
        items: list[str] = []
        while (item := self._item()) is not None:
            self._skip(lines=nested)
            items.append(item + self._repeated())
            self._skip(lines=nested)
        return " ".join(items) or '""'

    def _item(self) -> str | None:
        """Parse an item; None at the end of the sequence."""
        match self._next():
            case '"':
                return self._quoted()
            case "[":
                return self._character_class()
            case "(":
                return self._group()
            case ".":
                self.at += 1
                return ANY_CHARACTER
            case c if c and _NAME.match(c):
                start = self.at
                name = self._name("a rule's name")
                self.mentioned.setdefault(name, start)
                return self._lark_name(name)
            case _:
                return None

    def _group(self) -> str:
        self.depth += 1
        if self.depth > DEEPEST:
            self._fail(f"groups are nested more than {DEEPEST} deep")
        self.at += 1
        self._skip(lines=True)
        inside = self._alternatives(nested=True)
        if self._next() != ")":
            self._fail("a group is not closed")
        self.at += 1
        self.depth -= 1
        return f"({inside})"

    def _repeated(self) -> str:
        sign = self._next()
        if sign and sign in "*+?":
            self.at += 1
            return sign
        if sign != "{":
            return ""
        if not (times := _TIMES.match(self.text, self.at)):
            self._fail("a repetition is {m}, {m,} or {m,n}")
        self.at = times.end()
        least, comma, most = times.groups()
        return f"{{{least},{most or ''}}}" if comma else f"{{{least},{least}}}"

    def _quoted(self) -> str:
        self.at += 1
        characters = []
        while self._next() != '"':
            characters.append(self._character("a text is not closed"))
        self.at += 1
        if len(characters) < 2:
            return literal("".join(characters))
        return f"({' '.join(map(literal, characters))})"

    def _character_class(self) -> str:
        self.at += 1
        negated = self._next() == "^"
        self.at += negated
        ranges = []
        while self._next() != "]":
            first = last = self._character("a class is not closed")
            if self._next() == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                last = self._character("a class is not closed")
                if last < first:
                    self._fail(f"the range {first}-{last} of a class is empty")
            ranges.append(rf"\x{{{ord(first):x}}}-\x{{{ord(last):x}}}")
        self.at += 1
        if not ranges:
            self._fail("a class is empty")
        return f"/[{'^' if negated else ''}{''.join(ranges)}]/"

    def _character(self, unclosed: str) -> str:
        """The next one of a text or a class; escapes are read."""
        one = self._next()
        if one in ("", "\n"):
            self._fail(unclosed)
        self.at += 1
        if one != "\\":
            return one
        kind = self._next()
        self.at += 1
        if kind in ESCAPES:
            return ESCAPES[kind]
        digits = self.text[self.at : self.at + HEX_DIGITS.get(kind, 0)]
        self.at += len(digits)
        try:
            code = int(digits, 16) if len(digits) == HEX_DIGITS.get(kind) else -1
        except ValueError:
            code = -1
        if not 0 <= code < 0x110000 or 0xD800 <= code < 0xE000:
            self._fail(f"the escape '\\{kind}{digits}' means no character")
        return chr(code)

    # -- names and places ------------------------------------------------------------------------

    def _name(self, expected: str) -> str:
        if not (match := _NAME.match(self.text, self.at)):
            self._fail(f"{expected} is expected, and there is {self._next()!r}")
        self.at = match.end()
        return match[0]

    def _lark_name(self, name: str) -> str:
        number = self.numbers.setdefault(name, len(self.numbers))
        return "start" if name == "root" else f"rule_{number}"

    def _check_names(self) -> None:
        if "root" not in self.bodies:
            raise RequestError(
                f"{self.field} has no rule 'root', which an answer begins with",
                hint="write root ::= ... in it",
            )
        for name, place in self.mentioned.items():
            if name not in self.bodies:
                self.at = place
                self._fail(f"the rule {name!r} is not defined", did_you_mean(name, self.bodies))

    def _end_of_rule(self) -> None:
        rest = self._next()
        if rest and rest not in "\r\n":
            self._fail(f"{rest!r} has no place here")
        self._skip(lines=True)

    def _next(self) -> str:
        """Empty at the end of the text."""
        return self.text[self.at : self.at + 1]

    def _skip(self, lines: bool) -> None:
        """Space and comments; `lines`: the ends of lines, too."""
        match = (_SPACE_AND_LINES if lines else _SPACE).match(self.text, self.at)
        self.at = match.end() if match else self.at

    def _fail(self, problem: str, hint: str | None = None) -> NoReturn:
        line = self.text.count("\n", 0, self.at) + 1
        raise RequestError(
            f"{self.field} is no GBNF grammar: line {line}: {problem}",
            hint=hint or 'a rule is written as: name ::= "text" | [a-z]+ other-rule',
        )
