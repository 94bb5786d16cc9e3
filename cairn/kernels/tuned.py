"""Tuned launch configurations by GPU and shape, in tables that are read at run time.

    tables/nvidia-h200.json = {device, command, date, versions, kernels: {kernel: {key: {option: value}}}}

`cairn kernels tune` measures on a GPU and writes the table; nothing is tuned while a model is being served. A shape
without an entry runs with the default of its kernel, which is sound everywhere: the first one is a line on stderr, and
each is an event. A kernel module that can be tuned offers

    def tuning() -> Iterator[Tuning]      each key with its candidates, and how to make a call with one of them

and asks `tuned(kernel, key, default)` at each launch, which is a dictionary lookup; `kernel` is the name of the
module that offers `tuning`.
"""

import functools
import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cairn.core.errors import DataError
from cairn.core.events import instant

Config = Mapping[str, Any]

TABLES = Path(__file__).with_name("tables")


class Tuning(NamedTuple):
    """A key of the table, and the candidates for it."""

    key: str  # as the launch will ask for it: "columns=4096,bf16"
    candidates: Sequence[Config]
    prepare: Callable[[], Callable[[], object]]  # allocates, and returns the call to time


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: str
    command: str = ""
    date: str = ""
    versions: dict[str, str] = {}
    kernels: dict[str, dict[str, dict[str, int | float | bool | str | None]]] = {}


_trial: dict[tuple[str, str], Config] = {}  # what `trying` has put in place of the table


def tuned(kernel: str, key: str, default: Config) -> dict[str, Any]:
    """The configuration for `key` on this GPU; options that the table does not name stay at their default."""
    if _trial and (kernel, key) in _trial:
        return {**default, **_trial[kernel, key]}
    device = _current_device()
    if device is None:
        return dict(default)
    measured = _configurations(device).get(kernel, {}).get(key)
    if measured is None:
        _note_default(device, kernel, key)
        return dict(default)
    return {**default, **measured}


@contextmanager
def trying(kernel: str, key: str, config: Config) -> Generator[None]:
    """Within it, `tuned` answers with this configuration, whatever the table says."""
    _trial[kernel, key] = config
    try:
        yield
    finally:
        del _trial[kernel, key]


def slug(device: str) -> str:
    """nvidia-h200 for "NVIDIA H200": the name of a table."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def read_table(path: Path) -> Table:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Table)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(
            f"cannot read the tuned table {path.name}: {error}",
            hint="write it again with `cairn kernels tune`, or remove it to run with defaults",
        ) from None


def write_table(table: Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    fresh.replace(path)


def shipped(kernel: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every (key, configuration) of this kernel in the tables that come with the package, whatever GPU is here."""
    for path in sorted(TABLES.glob("*.json")):
        for key, config in read_table(path).kernels.get(kernel, {}).items():
            yield key, dict(config)


def numbers_of(key: str) -> dict[str, int]:
    """{"m": 8, "n": 4096} for "m=8,n=4096,bfloat16"."""
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", key)}


def forget() -> None:
    """Read the tables again at the next launch."""
    _configurations.cache_clear()
    _note_default.cache_clear()


def _current_device() -> str | None:
    """The name of the GPU that a launch would use; None without one, and in the interpreter."""
    torch = sys.modules.get("torch")  # launching a kernel has imported it
    if torch is None or not torch.cuda.is_initialized():
        return None
    return _device_name(torch.cuda.current_device())


@functools.cache
def _device_name(index: int) -> str:
    return sys.modules["torch"].cuda.get_device_name(index)


@functools.cache
def _configurations(device: str) -> Mapping[str, Mapping[str, Config]]:
    path = TABLES / f"{slug(device)}.json"
    if path.exists():
        return read_table(path).kernels
    hint = "`cairn kernels tune` measures better ones"
    print(f"note: kernels run with default configurations on {device}; {hint}", file=sys.stderr)
    return {}


@functools.cache
def _note_default(device: str, kernel: str, key: str) -> None:
    instant("kernel default", kernel=kernel, key=key, device=device, why="no entry in its table")
    is_first = _note_default.cache_info().currsize == 0
    if is_first and _configurations(device):  # without a table it was said already
        why = "its table has no entry for it; others like it are events only"
        print(f"note: {kernel} {key} runs with its default on {device}: {why}", file=sys.stderr)
