"""A JSON schema as the grammar compiler takes it: bounded in depth, without formats that are annotations only.

JSON Schema says that an unknown `format` is a remark for readers, so it is left out; the compiler would refuse it.
An object whose properties are listed gets no others, as with llama.cpp, Ollama and vLLM's default: JSON Schema would
allow any, and a small model goes on inventing them until its tokens end. `additionalProperties` says otherwise.
Values in `const`, `enum`, `default` and `examples` are data, and stay as they are. Knows no grammars.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from cairn.core.errors import RequestError

MOST_DEPTH = 120  # levels of objects and lists; the compiler reads 128, and adds some of its own
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
DATA = ("const", "enum", "default", "examples")
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# With these an object says itself which other properties it may have, or how many.
SAYS_OTHERS = frozenset(
    ("additionalProperties", "patternProperties", "propertyNames", "minProperties")
)
# Several schemas for one object: closed, each would forbid what the others list.
COMBINE = frozenset(("not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"))
BESIDE_PROPERTIES = frozenset(("allOf", "anyOf", "oneOf", "$ref"))


def check_depth(schema: object, field: str) -> None:
    """Level by level, because recursion would be what overflows."""
    depth, level = 0, [schema]
    while level:
        inner: list[object] = []
        for value in level:
            if isinstance(value, Mapping):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        level = [value for value in inner if isinstance(value, Mapping | list)]
        depth += 1
    if depth > MOST_DEPTH:
        raise RequestError(
            f"{field} is nested {depth} levels deep",
            hint=f"it can have {MOST_DEPTH} levels of objects and lists: name inner schemas in $defs",
        )


def without_annotations(schema: Any) -> Any:
    """The same schema without unknown formats; one that `check_depth` has passed."""
    if isinstance(schema, list):
        return [without_annotations(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        if key in DATA:
            kept[key] = value
        elif key in SCHEMAS_BY_NAME and isinstance(value, Mapping):
            kept[key] = {name: without_annotations(each) for name, each in value.items()}
        else:
            kept[key] = without_annotations(value)
    return kept


def closed_objects(schema: Any) -> Any:
    """The same schema, in which objects with a list of properties have no others unless they say so.

    A schema that combines several for one object stays as it is. For one that `check_depth` has passed.
    """
    return schema if any(map(_combines, _all_within(schema))) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in DATA:
            closed[key] = value
        elif key in SCHEMAS_BY_NAME and isinstance(value, Mapping):
            closed[key] = {name: _closed(each) for name, each in value.items()}
        else:
            closed[key] = _closed(value)
    return closed | {"additionalProperties": False} if _lists_all(schema) else closed


def _lists_all(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or SAYS_OTHERS & schema.keys():
        return False
    return isinstance(required, list) and all(name in properties for name in required)


def _combines(schema: Mapping[str, Any]) -> bool:
    several = isinstance(parts := schema.get("allOf"), list) and len(parts) > 1
    beside = "properties" in schema and BESIDE_PROPERTIES & schema.keys()
    return bool(several or beside or COMBINE & schema.keys())


def _all_within(schema: Any) -> Iterator[Mapping[str, Any]]:
    """This schema and every one inside of it."""
    if isinstance(schema, list):
        for each in schema:
            yield from _all_within(each)
    elif isinstance(schema, Mapping):
        yield schema
        for key, value in schema.items():
            if key in SCHEMAS_BY_NAME and isinstance(value, Mapping):
                yield from _all_within(list(value.values()))
            elif key not in DATA:
                yield from _all_within(value)
