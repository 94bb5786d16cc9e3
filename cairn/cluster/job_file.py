"""A job from a TOML or JSON file and back; what is wrong in the file, with its line and the name that was meant.

    read_job(Path("train.toml")) -> Job        job_toml(job), job_json(job) give the same job back

Knows how a job is written, not what it means.
"""

import json
import re
import typing
from pathlib import Path
from typing import Any

import msgspec

from cairn.cluster.spec import Job
from cairn.core import toml
from cairn.core.errors import ConfigError, did_you_mean

_AT = re.compile(r"(.*) - at `\$\.?(.*)`")


def read_job(path: Path) -> Job:
    """The job of a file; every way in which it cannot be read is a ConfigError."""
    if path.suffix == ".json":
        return job_from(_read_json(path), str(path), path.read_text(encoding="utf-8"))
    document = toml.read(path)
    return job_from(document.values, str(path), path.read_text(encoding="utf-8"))


def job_from(values: dict[str, Any], where: str, text: str = "") -> Job:
    """The job that these values say; `where` and `text` are for messages."""
    _refuse_unknown(Job, values, "", where, text)
    try:
        return msgspec.convert(values, Job)
    except msgspec.ValidationError as error:
        match = _AT.fullmatch(str(error))
        what, key = match.groups() if match else (str(error), "")
        name = re.sub(r"\[\d+\]", "", key).rpartition(".")[2]
        line = _line(name, text)
        tables = "each role is a table of its own: [[roles]]"
        raise ConfigError(
            f"{key or 'the job'}: {what[0].lower()}{what[1:]} ({where}{line})",
            hint=tables if name == "roles" else "docs/cluster.md has every field of a job",
        ) from None


def job_json(job: Job) -> str:
    return msgspec.json.format(msgspec.json.encode(_written(job))).decode() + "\n"


def job_toml(job: Job) -> str:
    lines: list[str] = []
    _tables(_written(job), "", lines)
    return "\n".join(lines).strip() + "\n"


def _written(job: Job) -> dict[str, Any]:
    values = msgspec.to_builtins(job)
    return {"version": job.version, **{key: value for key, value in values.items() if value != {}}}


def _tables(values: dict[str, Any], prefix: str, lines: list[str]) -> None:
    """Plain values first: in TOML whatever stands below [x] belongs to x."""
    deep = {key: value for key, value in values.items() if _is_deep(value)}
    for key, value in values.items():
        if key not in deep and value is not None:
            lines.append(f"{_key(key)} = {toml.render_value(value)}")
    for key, value in deep.items():
        name = f"{prefix}{_key(key)}"
        for item in value if isinstance(value, list) else [value]:
            lines.append(f"\n[[{name}]]" if isinstance(value, list) else f"\n[{name}]")
            _tables(item, f"{name}.", lines)


def _is_deep(value: object) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    )


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _refuse_unknown(schema: Any, values: object, prefix: str, where: str, text: str) -> None:
    """msgspec names an unknown field as well, but not the one that was meant."""
    if not isinstance(values, dict):
        return
    fields = {field.name: field.type for field in msgspec.structs.fields(schema)}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(
                f"unknown field '{prefix}{key}' ({where}{_line(str(key), text)})",
                hint=_meant(str(key), prefix, fields),
            )
        inner = _struct(fields[key])
        if inner is not None:
            for number, item in enumerate(value if isinstance(value, list) else [value]):
                at = f"{prefix}{key}[{number}]." if isinstance(value, list) else f"{prefix}{key}."
                _refuse_unknown(inner, item, at, where, text)


def _meant(key: str, prefix: str, fields: dict[str, Any]) -> str | None:
    """The field with the nearest name here, or the table in which this one stands."""
    near = did_you_mean(key, fields)
    if near is not None:
        return near
    others = {
        inner.name: outer.name
        for outer in msgspec.structs.fields(Job)
        if (schema := _struct(outer.type)) is not None
        for inner in msgspec.structs.fields(schema)
    }
    if not prefix and key in others:
        return f"'{key}' belongs to '{others[key]}'"
    if prefix and key in {field.name for field in msgspec.structs.fields(Job)}:
        return f"'{key}' belongs to the job itself: write it above the first [table]"
    return f"known here: {', '.join(fields)}"


def _struct(type_: Any) -> Any:
    """The Struct that a field holds, alone or in a list."""
    for part in (type_, *typing.get_args(type_)):
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            return part
    return None


def _line(key: str, text: str) -> str:
    match = re.search(rf"^\s*\[*\"?{re.escape(key)}\"?[\]\s]*(=|:|$)", text, re.MULTILINE)
    if not key or match is None:
        return ""
    start = text[: match.end()].count("\n")
    return f" line {start + 1}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}", hint="check the path") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {(error.strerror or str(error)).lower()}", hint="check the path"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}", hint="or write the job as TOML") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object", hint="a job begins with {") from None
    return values
