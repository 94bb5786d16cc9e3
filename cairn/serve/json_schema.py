"""A JSON schema as the grammar compiler takes it: bounded in depth, without formats that are annotations only.

JSON Schema says that an unknown `format` is a remark for readers, so it is left out; the compiler would refuse it.
Values in `const`, `enum`, `default` and `examples` are data, and stay as they are. Knows no grammars.
"""

from collections.abc import Mapping
from typing import Any

from cairn.core.errors import RequestError

MOST_DEPTH = 120  # levels of objects and lists; the compiler reads 128, and adds some of its own
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
DATA = ("const", "enum", "default", "examples")
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


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
