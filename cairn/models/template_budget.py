"""Limits for rendering a chat template: steps, characters and CPU seconds.

    budget.charge(characters)        one step, and the characters that it reads or writes
    budget.size(value)               characters of a value as text; each item is charged
    budget.foresee(name, value, ..)  the size of what a method or filter would return, before it is called

Every hook of the sandbox asks here. A value that is too large is refused before it is made, where one operation could
make it, and otherwise right behind it. Knows nothing about Jinja.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_TEXT = 1 << 26  # characters of one value: 64 MiB of prompt is beyond any context window
MAX_STEPS = 4_000_000  # a 100 MB conversation takes about half of them
MAX_SECONDS = 10.0  # of the thread's own time
_STEP_CHARACTERS = 256  # reading or writing so many is one step
_STEPS_PER_LOOK = 64  # at the clock, which is a system call
ITEM_CHARACTERS = 4  # brackets, commas, digits
_WIDEST = 99_999  # padding that a format may ask for
_MOST_DIGITS = 64  # that `round` keeps
_LARGE_FORMAT = re.compile(r"%[^a-zA-Z%]*(?:\d{6,}|\*)")
_LARGE_FIELD = re.compile(r"\{[^{}]*:[^{}]*(?:\d{6,}|\{)")


class Exhausted(Exception):
    """The template does too much; the message says of what."""


class Budget:
    """Budget of one rendering in one thread."""

    __slots__ = ("_look_at", "_steps", "_until")

    def __init__(self) -> None:
        self._steps = self._look_at = MAX_STEPS
        self._until = time.thread_time() + MAX_SECONDS

    def check_text(self, characters: int) -> None:
        if characters > MAX_TEXT:
            raise Exhausted(f"a text longer than {MAX_TEXT} characters")

    def charge(self, characters: int = 0, steps: int = 1) -> None:
        self.check_text(characters)
        self._steps -= steps + characters // _STEP_CHARACTERS
        if self._steps < self._look_at:
            self._look_at = self._steps - _STEPS_PER_LOOK
            self._look()

    def _look(self) -> None:
        if self._steps < 0:
            raise Exhausted(f"more than {MAX_STEPS} steps of work")
        if time.thread_time() > self._until:
            raise Exhausted(f"more than {MAX_SECONDS:g} seconds of work")

    def size(self, value: object) -> int:
        """Characters of a value as text. What is in it twice counts twice, since it is written twice."""
        if isinstance(value, str):
            return len(value)
        total, left = 0, [value]
        while left:
            one = left.pop()
            total += _own_size(one)
            if isinstance(one, Mapping):
                left += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple):
                left += one
            self.check_text(total)
            self.charge()
        return total

    def foresee(
        self, name: str, value: object, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Charge for what `value.name(...)` or `value | name(...)` would return, if it can be much larger."""
        if (growth := _GROWTH.get(name)) is not None:
            self.charge(growth(self, value, [*args, *kwargs.values()]))

    def foresee_format(self, form: str, values: object) -> None:
        """Charge for `form % values` or `form.format(values)`."""
        if _LARGE_FORMAT.search(form) or _LARGE_FIELD.search(form):
            raise Exhausted(f"a format with a width above {_WIDEST}, or one that is computed")
        fields = form.count("%") + form.count("{")
        padded = fields * _WIDEST if re.search(r"\d{3,}", form) else 0
        self.charge(len(form) + padded + fields * self.size(values))


def _own_size(value: object) -> int:
    if isinstance(value, str):
        return len(value) + ITEM_CHARACTERS
    if isinstance(value, int):
        return ITEM_CHARACTERS + value.bit_length() // 3
    return ITEM_CHARACTERS


def _numbers(args: Sequence[Any]) -> int:
    return sum(abs(int(arg)) for arg in args if isinstance(arg, int | float))


def _texts(args: Sequence[Any]) -> int:
    return sum(len(arg) for arg in args if isinstance(arg, str))


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple | Mapping) else ITEM_CHARACTERS


def _padded(budget: Budget, value: object, args: Sequence[Any]) -> int:
    return _length(value) + _numbers(args)


def _spread(budget: Budget, value: object, args: Sequence[Any]) -> int:
    """Each character may become so many."""
    return (1 + _length(value)) * (1 + _numbers(args) + _texts(args))


def _indented(budget: Budget, value: object, args: Sequence[Any]) -> int:
    lines = 1 + (value.count("\n") if isinstance(value, str) else 0)
    return _length(value) + lines * (8 + _numbers(args) + _texts(args))


def _joined(budget: Budget, value: object, args: Sequence[Any]) -> int:
    """`separator.join(items)` and `items | join(separator)`: either may be the text."""
    items = args[0] if isinstance(value, str) and args and not isinstance(args[0], str) else value
    separator = value if items is not value else args[0] if args else ""
    return budget.size(items) + _length(items) * _length(separator)


def _replaced(budget: Budget, value: object, args: Sequence[Any]) -> int:
    old, new = (*args, "", "")[:2]
    if not (isinstance(value, str) and isinstance(old, str) and isinstance(new, str)):
        return budget.size(value) + budget.size(list(args))
    return len(value) + value.count(old) * len(new)


def _translated(budget: Budget, value: object, args: Sequence[Any]) -> int:
    table = args[0] if args and isinstance(args[0], Mapping) else {}
    longest = max((_length(one) for one in table.values()), default=1)
    return _length(value) * (1 + longest)


def _rounded(budget: Budget, value: object, args: Sequence[Any]) -> int:
    if _numbers(args) > _MOST_DIGITS:
        raise Exhausted(f"rounding to more than {_MOST_DIGITS} digits")
    return 0


_GROWTH: dict[str, Callable[[Budget, object, Sequence[Any]], int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes", "batch", "slice"), _padded),
    **dict.fromkeys(("expandtabs", "wordwrap", "urlize", "xmlattr"), _spread),
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
    "round": _rounded,
    "translate": _translated,
}
