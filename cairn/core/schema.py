"""Schema of a configuration Struct: its values and what each accepts.

    class Optim(msgspec.Struct):             leaves(Train)
        lr: float = 1e-3             ---->     optim.lr    a number       default 0.001
    class Train(msgspec.Struct):               steps       an integer     required
        steps: int
        optim: Optim = Optim()

A leaf is text, a number, a boolean, a path, a Literal, a list or tuple of those, or one of them or
None; anything else in a schema is a mistake of the programmer and a TypeError. This module does not
know where a value was written: files, environment and command line come to it.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

S = TypeVar("S", bound=msgspec.Struct)


class AlsoFlag(msgspec.Struct, frozen=True):
    """A note on a positional argument that may be given as this flag as well, such as URL as --url."""

    name: str


class Leaf(msgspec.Struct, frozen=True):
    """A value that can be set."""

    key: str  # "optim.lr": its name in a file, in the environment, on the command line
    type: Any
    default: Any  # msgspec.NODEFAULT when it has to be given
    values: int | None  # how many words it takes on the command line: 0 a switch, None any number
    positional: bool = False
    aliases: tuple[str, ...] = ()
    metavar: str | None = None

    @property
    def required(self) -> bool:
        return self.default is msgspec.NODEFAULT


class ExpectedValue(ValueError):
    """A value does not fit its leaf; the text says what would."""


def leaves(schema: type[msgspec.Struct]) -> list[Leaf]:
    """Every value of the schema in the order of declaration."""
    all_leaves = list(_leaves(schema, msgspec.NODEFAULT, prefix=""))
    positionals = [leaf for leaf in all_leaves if leaf.positional]
    if any(leaf.values != 1 for leaf in positionals[:-1]) or any(
        leaf.values not in (1, None) for leaf in positionals
    ):
        raise TypeError(f"{schema.__name__}: only the last positional argument can be a list")
    return all_leaves


def _leaves(schema: type[msgspec.Struct], instance: object, prefix: str) -> Iterator[Leaf]:
    for field in msgspec.structs.fields(schema):
        if instance is msgspec.NODEFAULT:
            default = _default(field)
        else:  # the default of the parent decides, and it may differ from the class's own
            default = getattr(instance, field.name)
        key = prefix + _name(field)
        if _is_struct(field.type):
            yield from _leaves(_without_notes(field.type), default, prefix=f"{key}.")
        else:
            yield _leaf(key, field.type, default)


def flatten(config: msgspec.Struct, prefix: str = "") -> dict[str, Any]:
    """The value of every leaf, by key."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(config):
        key, value = prefix + _name(field), getattr(config, field.name)
        if _is_struct(field.type):
            values |= flatten(value, prefix=f"{key}.")
        else:
            values[key] = value
    return values


def build(schema: type[S], values: dict[str, Any], prefix: str = "") -> S:
    """The Struct with these values, one per leaf. What its __post_init__ raises goes through."""
    arguments = {}
    for field in msgspec.structs.fields(schema):
        key = prefix + _name(field)
        if _is_struct(field.type):
            arguments[field.name] = build(_without_notes(field.type), values, prefix=f"{key}.")
        else:
            arguments[field.name] = values[key]
    return schema(**arguments)


def read_value(leaf: Leaf, raw: object, *, text: bool) -> Any:
    """The leaf's value; with text=True, `raw` is a word or a list of words, else TOML's types."""
    if text and _none_is_no_text(leaf.type) and raw in ("none", "None", ["none"], ["None"]):
        return None
    try:
        value = msgspec.convert(raw, leaf.type, strict=not text, dec_hook=_read_path)
    except msgspec.ValidationError:
        raise ExpectedValue(describe(leaf.type)) from None
    if isinstance(value, float) and math.isnan(value):  # passes every >= and <= unseen
        raise ExpectedValue(describe(leaf.type))
    return value


def plain_value(value: object) -> Any:
    """The value as TOML and JSON know it: a path is text, a tuple is a list."""
    return msgspec.to_builtins(value, enc_hook=str)


def choices(type_: Any) -> list[Any]:
    """The values of all Literals within a type; empty for other types."""
    inner = _without_notes(type_)
    if get_origin(inner) is Literal:
        return list(get_args(inner))
    return [choice for part in get_args(inner) for choice in choices(part)]


def describe(type_: Any) -> str:
    """Describe the accepted values: "a number >= 0 and <= 1", "'auto' or an integer"."""
    inner, limits = _without_notes(type_), _limits(type_)
    if inner in _WORDS:
        return _WORDS[inner] + limits
    origin, arguments = get_origin(inner), get_args(inner)
    if origin is Literal:
        return _alternatives([repr(choice) for choice in arguments])
    if origin in (Union, UnionType):  # None stands last, as people say it
        ordered = sorted(arguments, key=lambda part: part is NoneType)
        return _alternatives([describe(part) for part in ordered])
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        return f"a list, each {describe(arguments[0])}{limits}"
    return f"{len(arguments)} values: " + ", ".join(describe(part) for part in arguments)


_WORDS = {
    str: "text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    Path: "a path",
    NoneType: "none",
}


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _leaf(key: str, type_: Any, default: object) -> Leaf:
    notes = get_args(type_)[1:] if get_origin(type_) is Annotated else ()
    # tyro.conf.Positional and tyro.conf.arg: a module with them has imported tyro already, and a
    # schema without them should not pay for it.
    conf = sys.modules.get("tyro.conf")
    positional = conf is not None and any(note is conf.Positional for note in notes)
    argument = next((note for note in notes if hasattr(note, "metavar")), None)
    also = tuple(note.name for note in notes if isinstance(note, AlsoFlag))
    return Leaf(
        key=key,
        type=type_,
        default=default,
        values=_values(key, type_, positional),
        positional=positional,
        aliases=(*(getattr(argument, "aliases", None) or ()), *also),
        metavar=getattr(argument, "metavar", None),
    )


def _name(field: msgspec.structs.FieldInfo) -> str:
    """The field's own name, or that of tyro.conf.arg(name=...): `from` cannot be a field."""
    notes = get_args(field.type)[1:] if get_origin(field.type) is Annotated else ()
    renamed = [note.name for note in notes if hasattr(note, "metavar") and note.name]
    return renamed[0] if renamed else field.name


def _values(key: str, type_: Any, positional: bool) -> int | None:
    """Number of command-line arguments that a type takes; raises for a type without such a form."""
    inner = _without_notes(type_)
    if inner is bool and not positional:
        return 0
    if _is_scalar(inner):
        return 1
    parts = get_args(inner)
    if get_origin(inner) in (Union, UnionType):
        alternatives = [part for part in parts if part is not NoneType]
        if len(alternatives) == 1:
            return _values(key, alternatives[0], positional)
    elif get_origin(inner) is list and _is_scalar(parts[0]):
        return None
    elif get_origin(inner) is tuple:
        if parts[-1] is Ellipsis and _is_scalar(parts[0]):
            return None
        if all(_is_scalar(part) for part in parts):
            return len(parts)
    raise TypeError(f"{key}: {type_} has no form on the command line; see cairn.core.schema")


def _is_struct(type_: Any) -> bool:
    inner = _without_notes(type_)
    return isinstance(inner, type) and issubclass(inner, msgspec.Struct)


def _is_scalar(type_: Any) -> bool:
    inner = _without_notes(type_)
    if get_origin(inner) in (Union, UnionType):
        return all(_is_scalar(part) for part in get_args(inner))
    return inner in _WORDS or get_origin(inner) is Literal


def _none_is_no_text(type_: Any) -> bool:
    """Return whether the text `none` means None; for a type that accepts any text it is text."""
    parts = [_without_notes(part) for part in get_args(_without_notes(type_))]
    return NoneType in parts and str not in parts


def _without_notes(type_: Any) -> Any:
    while get_origin(type_) is Annotated:
        type_ = get_args(type_)[0]
    return type_


def _limits(type_: Any) -> str:
    """The msgspec.Meta of a type as text: " >= 0 and <= 1"."""
    notes = get_args(type_)[1:] if get_origin(type_) is Annotated else ()
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "a multiple of"}
    signs |= {"min_length": "of length >=", "max_length": "of length <=", "pattern": "matching"}
    limits = [
        f"{sign} {limit}"
        for note in notes
        if isinstance(note, msgspec.Meta)
        for name, sign in signs.items()
        if (limit := getattr(note, name)) is not None
    ]
    return " " + " and ".join(limits) if limits else ""


def _alternatives(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _read_path(type_: type, raw: object) -> Path:
    if type_ is Path and isinstance(raw, str):
        return Path(raw)
    raise TypeError(f"not a path: {raw!r}")
