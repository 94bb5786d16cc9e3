"""Structured-output options of a request, in all formats that clients use.

    response_format       {"type": "json_object"} | {"type": "json_schema", "json_schema": {"schema": {...}}}
                          {"type": "json_object", "schema": {...}}           as llama.cpp and Together have it
    structured_outputs    {"json": {...}} | {"regex": ...} | {"choice": [...]} | {"grammar": ...}
    guided_json, guided_regex, guided_choice, guided_grammar         the same, under their older names
    grammar, json_schema                                             the same, as llama.cpp's server names them

All become one `Guide`: a JSON schema, a regular expression or a grammar (Lark or GBNF) as text. Whether that text
means anything is found when it is compiled, in `grammar`; what is wrong with its form is said here. Knows no tokens
and no HTTP.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from cairn.core.errors import RequestError, did_you_mean
from cairn.serve.json_schema import check_depth, closed_objects, without_annotations

Kind = Literal["json_schema", "regex", "lark", "gbnf"]
FORMATS = ("text", "json_object", "json_schema")
WAYS = ("json", "regex", "choice", "grammar", "json_object")
MOST_CHARACTERS = 2**18  # of a schema, an expression or a grammar
MOST_CHOICES = 10_000
_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of an answer in Python: `SamplingParams(structured_outputs=StructuredOutputs(json=schema))`."""

    json: Mapping[str, Any] | str | None = None  # a JSON schema
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # in Lark's notation, or in llama.cpp's (GBNF)
    json_object: bool | None = None


class Guide(msgspec.Struct, frozen=True, array_like=True):
    """Plain text, so that it can be a key, and travel to another process."""

    kind: Kind
    text: str
    field: str  # of the request, for messages


def read_guide(
    *,
    response_format: object = None,
    structured_outputs: object = None,
    guided_json: object = None,
    guided_regex: object = None,
    guided_choice: object = None,
    guided_grammar: object = None,
    grammar: object = None,
    json_schema: object = None,
) -> Guide | None:
    """The one guide of a request; None: it may say what it likes. RequestError names the field that is wrong."""
    older = {
        "json": guided_json,
        "regex": guided_regex,
        "choice": guided_choice,
        "grammar": guided_grammar,
    }
    named = [(way, value, f"guided_{way}") for way, value in older.items()]
    named += [("grammar", grammar, "grammar"), ("json", json_schema, "json_schema")]
    parts = [_of_way(way, value, field) for way, value, field in named if value is not None]
    if response_format is not None:
        parts.append(_of_response_format(response_format))
    if structured_outputs is not None:
        parts += _of_structured_outputs(structured_outputs)
    guides = [guide for guide in parts if guide is not None]
    if len(guides) > 1:
        raise RequestError(
            f"{guides[0].field} and {guides[1].field} both say what the answer looks like",
            hint="send one of them",
        )
    return guides[0] if guides else None


def schema_guide(schema: Mapping[str, Any] | bool, field: str) -> Guide:
    check_depth(schema, field)
    text = msgspec.json.encode(closed_objects(without_annotations(schema))).decode()
    return Guide("json_schema", _bounded(text, field), field)


def lark_guide(grammar: str, field: str) -> Guide:
    return Guide("lark", _bounded(grammar, field), field)


def grammar_guide(grammar: str, field: str) -> Guide:
    """Lark or GBNF: only the latter has rules with `::=`."""
    kind: Kind = "gbnf" if _GBNF_RULE.search(grammar) else "lark"
    return Guide(kind, _bounded(grammar, field), field)


def literal(text: str) -> str:
    """Text as a Lark grammar spells it."""
    return msgspec.json.encode(text).decode()


def _of_response_format(value: object) -> Guide | None:
    field = "response_format"
    shape = _object(value, field)
    kind = shape.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        if (schema := shape.get("schema")) is not None:
            return schema_guide(_object(schema, f"{field}.schema"), f"{field}.schema")
        return schema_guide({"type": "object"}, field)
    if kind != "json_schema":
        hint = did_you_mean(str(kind), FORMATS, otherwise=f"it has to be {', '.join(FORMATS)}")
        raise RequestError(f"{field}.type is {_shown(kind)}", hint=hint)
    inner = _object(shape.get("json_schema"), f"{field}.json_schema")
    name = f"{field}.json_schema.schema"
    return schema_guide(_object(inner.get("schema", inner.get("schema_")), name), name)


def _of_structured_outputs(constraints: object) -> list[Guide | None]:
    field = "structured_outputs"
    if isinstance(constraints, StructuredOutputs):
        constraints = msgspec.structs.asdict(constraints)
    ways = {key: value for key, value in _object(constraints, field).items() if value is not None}
    for way in ways:
        if way not in WAYS:
            hint = did_you_mean(way, WAYS, otherwise=f"there are: {', '.join(WAYS)}")
            raise RequestError(f"{field} has no '{way}'", hint=hint)
    return [_of_way(way, value, f"{field}.{way}") for way, value in ways.items()]


def _of_way(way: str, value: object, field: str) -> Guide | None:
    match way:
        case "json":
            return schema_guide(_schema(value, field), field)
        case "json_object":
            if not isinstance(value, bool):
                raise RequestError(f"{field} is {_shown(value)}", hint="it has to be true or false")
            return schema_guide({"type": "object"}, field) if value else None
        case "regex":
            return Guide("regex", _bounded(_text(value, field), field), field)
        case "choice":
            return lark_guide("start: " + " | ".join(map(literal, _choices(value, field))), field)
        case _:
            return grammar_guide(_text(value, field), field)


def _choices(value: object, field: str) -> list[str]:
    hint = f"it has to be a list of 1 to {MOST_CHOICES} texts"
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MOST_CHOICES:
        count = f" of {len(value)}" if isinstance(value, list | tuple) else ""
        raise RequestError(f"{field} is {type(value).__name__}{count}", hint=hint)
    for at, choice in enumerate(value):
        _text(choice, f"{field}[{at}]")
    return list(dict.fromkeys(value))


def _schema(value: object, field: str) -> Mapping[str, Any]:
    """Older clients send a schema as text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(_bounded(value, field))
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"{field} is not JSON: {error}") from None
    return _object(value, field)


def _object(value: object, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{field} is {_shown(value)}", hint="it has to be an object")
    return value


def _text(value: object, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(
            f"{field} is {_shown(value)}", hint="it has to be text that is not empty"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{field} has half of a surrogate pair") from None
    return value


def _bounded(text: str, field: str) -> str:
    if len(text) > MOST_CHARACTERS:
        raise RequestError(
            f"{field} has {len(text)} characters", hint=f"it can have {MOST_CHARACTERS}"
        )
    return text


def _shown(value: object) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
