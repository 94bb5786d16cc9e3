"""Configuration of a command from four layers: defaults < TOML file < environment < flags.

    class Generate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        model: tyro.conf.Positional[str]
        top_p: float = 1.0              run.toml:  top_p = 0.9
        optim: Optim = Optim()          CAIRN_GENERATE_OPTIM__LR=3e-4      --optim.lr 3e-4

    loaded = load(Generate, args=args, env_prefix="CAIRN_GENERATE_")
    loaded.value.top_p                  0.9
    loaded.origins["top_p"]             file run.toml line 1

A later layer wins, even when it repeats the default. Every layer is checked in full: an unknown
name or a value of the wrong kind is an error, even where a later layer would have hidden it. Knows
nothing about what the settings mean.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from cairn.core import toml
from cairn.core.errors import ConfigError, UsageError, closest, did_you_mean
from cairn.core.flags import asks_for, flag_name, read_flags
from cairn.core.help import print_help
from cairn.core.schema import ExpectedValue, Leaf, build, choices, flatten, leaves, read_value

T = TypeVar("T", bound=msgspec.Struct)


class SettingOrigin(msgspec.Struct, frozen=True):
    """The layer and the place that set a value."""

    layer: Literal["default", "file", "environment", "flag", "argument"]
    where: str = ""  # "run.toml line 12", "CAIRN_GENERATE_TOP_P", "--top-p", "MODEL"

    def __str__(self) -> str:
        return f"{self.layer} {self.where}".rstrip()


class Loaded(msgspec.Struct, Generic[T], frozen=True):
    """A configuration, and for each of its dotted keys where the value was written."""

    value: T
    origins: dict[str, SettingOrigin]


class Setting(msgspec.Struct, frozen=True):
    """A value of one layer for one key, before its type is checked."""

    raw: Any
    origin: SettingOrigin

    @property
    def is_text(self) -> bool:
        return self.origin.layer != "file"


def load(
    schema: type[T],
    *,
    args: Sequence[str],
    env_prefix: str,
    file: Path | str | None = None,
    file_field: str | None = None,
    env: Mapping[str, str] = os.environ,
    prog: str | None = None,
) -> Loaded[T]:
    """The configuration that the four layers add up to.

    `--help` prints the help, with the values of `file` as defaults, and exits with 0; `--explain` prints where each
    value was written and does the same.

    file_field names the field (`config`, `recipe`) whose value is the path of the TOML file, for a
    command that takes the file as a flag or an argument. prog is the command in messages; "cairn
    generate" is derived from the prefix CAIRN_GENERATE_.
    """
    prog = prog or env_prefix.rstrip("_").replace("_", " ").lower()
    settings = {"env_prefix": env_prefix, "file": file, "env": env, "prog": prog}
    if asks_for(args, "--help", "-h"):
        others = [arg for arg in args if arg not in ("--help", "-h")]
        values = None if file is None else load(schema, args=others, **settings).value
        print_help(schema, prog, values)
        raise SystemExit(0)
    if asks_for(args, "--explain"):
        others = [arg for arg in args if arg != "--explain"]
        print(explain(load(schema, args=others, file_field=file_field, **settings)))
        raise SystemExit(0)
    leaves_by_key = {leaf.key: leaf for leaf in leaves(schema)}
    from_flags = _from_flags(leaves_by_key, args, prog)
    from_environment = _from_environment(leaves_by_key, env, env_prefix)
    if file is None and file_field is not None:
        path_setting = from_flags.get(file_field) or from_environment.get(file_field)
        file = _checked(leaves_by_key[file_field], path_setting, prog) if path_setting else None
    from_file = _from_file(leaves_by_key, Path(file)) if file is not None else {}

    values = {key: leaf.default for key, leaf in leaves_by_key.items()}
    origins = {key: SettingOrigin("default") for key in leaves_by_key}
    for layer in (from_file, from_environment, from_flags):
        for key, setting in layer.items():
            values[key] = _checked(leaves_by_key[key], setting, prog)
            origins[key] = setting.origin
    for key, leaf in leaves_by_key.items():
        if values[key] is msgspec.NODEFAULT:
            raise _missing(leaf, env_prefix, prog)
    return Loaded(build(schema, values), origins)


def explain(loaded: Loaded[Any]) -> str:
    """Render each value with its origin on a line: `top_p = 0.9   flag --top-p`."""
    assignments = [
        f"{key} = {toml.render_value(value)}" for key, value in flatten(loaded.value).items()
    ]
    width = max(map(len, assignments), default=0)
    return "\n".join(
        f"{text:<{width}}   {origin}"
        for text, origin in zip(assignments, loaded.origins.values(), strict=True)
    )


def to_toml(config: msgspec.Struct) -> str:
    """A file that gives the same configuration back."""
    return toml.render(config)


def variable_name(key: str, env_prefix: str) -> str:
    """The environment variable of a key: CAIRN_TRAIN_OPTIM__LR for optim.lr."""
    return env_prefix + key.upper().replace(".", "__").replace("-", "_")


def _from_flags(
    leaves_by_key: dict[str, Leaf], args: Sequence[str], prog: str
) -> dict[str, Setting]:
    words = read_flags(list(leaves_by_key.values()), args, prog)
    return {
        key: Setting(
            word.raw,
            SettingOrigin("argument" if leaves_by_key[key].positional else "flag", word.name),
        )
        for key, word in words.items()
    }


def _from_environment(
    leaves_by_key: dict[str, Leaf], env: Mapping[str, str], prefix: str
) -> dict[str, Setting]:
    names = {variable_name(key, prefix): leaf for key, leaf in leaves_by_key.items()}
    settings: dict[str, Setting] = {}
    for name in sorted(env):
        if not name.startswith(prefix):
            continue
        if name not in names:
            # Compared without the prefix, which would make all of them look alike.
            match = closest(name[len(prefix) :], [other[len(prefix) :] for other in names])
            raise ConfigError(
                f"unknown environment variable {name}={_shown(env[name])}",
                hint=f"did you mean '{prefix}{match}'?" if match else f"remove it: unset {name}",
            )
        leaf = names[name]
        raw = env[name] if leaf.values in (0, 1) else _split(env[name])
        settings[leaf.key] = Setting(raw, SettingOrigin("environment", name))
    return settings


def _split(text: str) -> list[str]:
    """A list in an environment variable: `a,b`, or JSON where an item has a comma: `["a,b"]`."""
    if text.startswith("["):
        try:
            items = msgspec.json.decode(text, type=list[str | int | float])
        except msgspec.DecodeError:
            return [text]  # one word that begins with a bracket
        return [str(item) for item in items]
    return text.split(",") if text else []


def _from_file(leaves_by_key: dict[str, Leaf], path: Path) -> dict[str, Setting]:
    document = toml.read(path)
    settings: dict[str, Setting] = {}
    for key, raw in _walk(document.values, leaves_by_key, prefix=""):
        origin = SettingOrigin("file", document.where(key))
        if key not in leaves_by_key:
            raise _unknown_key(key, raw, origin, leaves_by_key)
        settings[key] = Setting(raw, origin)
    return settings


def _unknown_key(
    key: str, raw: object, origin: SettingOrigin, leaves_by_key: dict[str, Leaf]
) -> ConfigError:
    if any(other.startswith(f"{key}.") for other in leaves_by_key):
        return ConfigError(
            f"{key}: expected a table, got {_shown(raw)} ({origin})",
            hint=f"write [{key}] above its keys",
        )
    tables = {other.rpartition(".")[0] for other in leaves_by_key if "." in other}
    what = f"table [{key}]" if isinstance(raw, dict) else f"key '{key}' = {_shown(raw)}"
    return ConfigError(
        f"unknown {what} ({origin})",
        hint=did_you_mean(
            key,
            tables if isinstance(raw, dict) else leaves_by_key,
            otherwise=f"known keys: {', '.join(leaves_by_key)}",
        ),
    )


def _walk(
    values: dict[str, Any], leaves_by_key: dict[str, Leaf], prefix: str
) -> Iterator[tuple[str, Any]]:
    """Dotted keys of a document, going only into tables that the schema has."""
    for name, value in values.items():
        key = prefix + name
        if isinstance(value, dict) and any(other.startswith(f"{key}.") for other in leaves_by_key):
            yield from _walk(value, leaves_by_key, prefix=f"{key}.")
        else:
            yield key, value


def _checked(leaf: Leaf, setting: Setting, prog: str) -> Any:
    raw, origin = setting.raw, setting.origin
    try:
        return read_value(leaf, raw, text=setting.is_text)
    except ExpectedValue as expected:
        kind = UsageError if origin.layer in ("flag", "argument") else ConfigError
        raise kind(
            f"{leaf.key}: expected {expected}, got {_shown(raw)} ({origin})",
            hint=_hint(leaf, setting, prog),
        ) from None


def _hint(leaf: Leaf, setting: Setting, prog: str) -> str:
    explained = f"`{prog} --help` says what {leaf.key} is"
    if isinstance(setting.raw, str) and (options := choices(leaf.type)):
        return did_you_mean(setting.raw, [str(option) for option in options]) or explained
    if setting.origin.layer == "file" and isinstance(setting.raw, str):
        return "in TOML only text stands in quotes, and a list in brackets"
    return explained


def _shown(raw: object) -> str:
    """A value in a message: one line, and not a page."""
    text = repr(raw)
    return text if len(text) <= 80 else f"{text[:60]} ... ({len(text)} characters)"


def _missing(leaf: Leaf, env_prefix: str, prog: str) -> UsageError:
    name = flag_name(leaf)
    usage = f"{name} ..." if leaf.positional else f"{name} VALUE"
    return UsageError(
        f"{name} is missing",
        hint=f"write `{prog} {usage}`, or set {variable_name(leaf.key, env_prefix)}",
    )
