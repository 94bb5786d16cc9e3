"""Decoding of request bodies to Structs; errors are 400 responses with the field, its value and the valid values.

    {"temperature": 3.5}  ->  400 "temperature is 3.5; it has to be a number between 0 and 2", param "temperature"

msgspec does the checking in one pass; only a mistake pays for the explanation. A body is read with a limit on its size
and on the time it may take.
"""

import asyncio
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope

from cairn.serve.http.protocol.refusal import Refusal

S = TypeVar("S", bound=msgspec.Struct)
_ONE = [("an", "object"), ("a", "whole number"), ("a", "number"), ("a", "list")]
SHOWN = 80  # characters of a wrong value in a message
_PATH = re.compile(r"`\$\.?([^`]*)`$")
# One half of a surrogate pair in JSON's escapes: a high one that no low one follows, or the reverse.
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = re.compile(rb"%b(?!%b)|(?<!\\u[dD][89abAB]..)%b" % (_HIGH, _LOW, _LOW))
_MISSING = re.compile(r"missing required field `([^`]+)`")


class Gone(Exception):
    """The client has left: no answer can be sent."""


async def read_bytes(scope: Scope, receive: Receive, most_bytes: int, patience_s: float) -> bytes:
    """The whole body; 413 as soon as it is known to be too large, 408 when it does not come."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    if declared.isdigit() and int(declared) > most_bytes:
        raise _too_large(most_bytes)
    try:
        async with asyncio.timeout(patience_s):
            return await _collect(receive, most_bytes)
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {patience_s:g} s") from None


async def _collect(receive: Receive, most_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most_bytes:
            raise _too_large(most_bytes)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(most_bytes: int) -> Refusal:
    return Refusal(413, f"the body is larger than {most_bytes} bytes", code="body_too_large")


def decode(body: bytes, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if (byte := _not_utf8(body)) is not None:  # such a text is of no type
            raise Refusal(400, f"the body is not JSON: {byte}", code="invalid_json") from None
        raise _explained(str(error), body, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, no_json(body, error), code="invalid_json") from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply", code="invalid_json") from None


def no_json(body: bytes, error: Exception, what: str = "the body") -> str:
    """Error message for a body that is not JSON, clearer than msgspec's for truncated characters and strings."""
    if not body.strip():
        return f"{what} is empty; it has to be JSON"
    if (byte := _not_utf8(body)) is not None:
        return f"{what} is not JSON: {byte}"
    if half := _HALF.search(body):
        return (
            f"{what} is not JSON: {half[0].decode()} at byte {half.start()} is half of a character: a text was cut "
            "between the two halves of a surrogate pair"
        )
    return f"{what} is not JSON: {error}"


def _not_utf8(body: bytes) -> str | None:
    """The first byte that is no part of a text, in words."""
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        return f"0x{body[wrong.start]:02x} at byte {wrong.start} is not UTF-8 ({wrong.reason})"
    return None


def _explained(problem: str, body: bytes, kind: type[msgspec.Struct]) -> Refusal:
    path = _PATH.search(problem)
    where = path[1] if path else ""
    text = problem.partition(" - at ")[0]
    if missing := _MISSING.search(problem):
        name = f"{where}.{missing[1]}" if where else missing[1]
        return Refusal(400, f"{name} is missing", param=name, code="missing_field")
    if not where:
        return Refusal(400, f"the body is wrong: {text[:1].lower()}{text[1:]}")
    value_at = f"{where} is {_value_at(body, where)}"
    leaf = _type_at(kind, where)
    if leaf is not None and (rule := described(leaf)):
        message = f"{value_at}; it has to be {rule}"
    else:
        message = f"{value_at}: {text[:1].lower()}{text[1:]}"
    return Refusal(400, message, param=where, code="invalid_value")


def _steps(where: str) -> list[tuple[str, str]]:
    """A path of msgspec's as names and indices: `tools[0].name` is tools, 0, name. Of a map's keys it tells none."""
    return re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", where)


def _type_at(kind: type[msgspec.Struct], where: str) -> msgspec.inspect.Type | None:
    """Type at a path of the body; None if it is ambiguous."""
    info = msgspec.inspect
    type_here: info.Type = info.type_info(kind)
    for name, _ in _steps(where):
        options = type_here.types if isinstance(type_here, info.UnionType) else (type_here,)
        inner = []
        for option in options:
            if isinstance(option, info.StructType) and name:
                inner += [field.type for field in option.fields if field.encode_name == name]
            elif isinstance(option, info.DictType):
                inner.append(option.value_type)
            elif isinstance(option, info.ListType) and not name:
                inner.append(option.item_type)
        if len(inner) != 1:
            return None
        type_here = inner[0]
    return type_here


def _value_at(body: bytes, where: str) -> str:
    """A value of the body, as it is shown; what follows a mistake may not even be JSON."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "wrong"
    for name, at in _steps(where):
        try:
            value = value[name] if name else value[int(at)]
        except (
            LookupError,
            TypeError,
            ValueError,
        ):  # the names of a map's entries are not known: show all
            break
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def described(kind: msgspec.inspect.Type) -> str:
    """Describe the valid values of a type with its range; empty for complex types."""
    info = msgspec.inspect
    match kind:
        case info.UnionType():
            return " or ".join(_unique(described(each) for each in kind.types))
        case info.NoneType():
            return "null"
        case info.BoolType():
            return "true or false"
        case info.IntType():
            return f"a whole number{_range(kind)}"
        case info.FloatType():
            return f"a number{_range(kind)}"
        case info.StrType():
            return "text"
        case info.LiteralType():
            return " or ".join(f'"{value}"' for value in kind.values)
        case info.ListType():
            return f"a list of {_several(described(kind.item_type)) or 'values'}"
        case info.DictType():
            return "an object"
        case info.StructType():
            return "an object"
    return ""


def _several(words: str) -> str:
    for article, one in _ONE:
        words = words.replace(f"{article} {one}", f"{one}s")
    return words


def _unique(words: Iterable[str]) -> list[str]:
    return [word for word in dict.fromkeys(words) if word and word != "null"]


def _range(kind: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    least, most = kind.ge, kind.le
    above = f"above {kind.gt:g}" if kind.gt is not None else None
    if least is not None and most is not None:
        return f" between {_number(least)} and {_number(most)}"
    parts = [
        above,
        None if least is None else f"at least {_number(least)}",
        None if most is None else f"at most {_number(most)}",
    ]
    bounds = " and ".join(part for part in parts if part)
    return f" {bounds}" if bounds else ""


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)
