"""Chaos plan as data: the faults and their times.

    name = "kill-rank"
    argv = ["cairn", "train", "{here}/tiny.toml"]  the job; {here}: the plan's folder; --out is added
    [[faults]]
    kind = "kill"                                  kill stop slow partition fill-disk corrupt-checkpoint flip-bit
    target = "rank 2"                              rank N | any rank | memory N | node N | memories
    between = [10, 40]                             a step at random in there; or at_step = 12
    times = 5

Pure: the same seed gives the same steps and the same victims. Knows no process.
"""

import random
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from cairn.core import toml
from cairn.core.errors import ConfigError, did_you_mean
from cairn.core.units import parse_bytes

Kind = Literal["kill", "stop", "slow", "partition", "fill-disk", "corrupt-checkpoint", "flip-bit"]
KINDS: tuple[Kind, ...] = Kind.__args__  # type: ignore[attr-defined]
QUIET: tuple[Kind, ...] = (
    "slow",
    "fill-disk",
    "corrupt-checkpoint",
)  # the run need not notice these
Positive = Annotated[int, msgspec.Meta(ge=1)]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    kind: Kind
    target: str = "any rank"
    at_step: int | None = None
    between: tuple[int, int] | None = None
    times: Positive = 1
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    """how long slow and partition last"""
    duty: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.2
    """slow: the share of the time in which the victim may run"""
    limit: str = "64KiB"
    """fill-disk: no file may grow beyond this"""


class ChaosPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    argv: list[str]
    faults: list[Fault]
    seed: int = 0
    compare: bool = True
    """also run the job unbroken, and hold the losses against each other"""
    exact: bool = True
    """the losses must be the same to the last bit; off: nearly, as after a change of the layout"""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    most_steps_lost: int | None = None
    """by one failure; more is a broken promise"""
    most_detect_s: float | None = None
    most_recovery_s: float | None = None


class Due(msgspec.Struct, frozen=True):
    """A fault at a step."""

    step: int
    fault: Fault
    number: int


def read_plan(path: Path) -> ChaosPlan:
    document = toml.read(path)
    try:
        plan = msgspec.convert(document.values, ChaosPlan)
        here = str(path.parent)
        argv = [word.replace("{here}", here) for word in plan.argv]
        plan = msgspec.structs.replace(plan, argv=argv)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_plain(error)}", hint=_hint(document.values)) from None
    for number, fault in enumerate(plan.faults, start=1):
        _check(fault, f"{path}: fault {number}")
    if not plan.argv or not plan.faults:
        raise ConfigError(f"{path}: a plan needs argv and faults", hint="see examples/chaos/")
    return plan


def schedule(plan: ChaosPlan) -> list[Due]:
    """Every fault with its step, in order."""
    chance = random.Random(plan.seed)
    due = []
    for fault in plan.faults:
        for _ in range(fault.times):
            low, high = fault.between or (fault.at_step or 1, fault.at_step or 1)
            due.append((chance.randint(low, high), fault))
    due.sort(key=lambda pair: pair[0])
    return [Due(step, fault, number) for number, (step, fault) in enumerate(due)]


def victim(target: str, chance: random.Random, ranks: int, nodes: int) -> tuple[str, int]:
    """(rank | memory | node | memories, its number)."""
    match target.split():
        case ["any", "rank"]:
            return "rank", chance.randrange(ranks)
        case ["any", "process"]:
            memories = [("memory", number) for number in range(nodes)]
            return chance.choice([*(("rank", number) for number in range(ranks)), *memories])
        case ["memories"]:
            return "memories", 0
        case [("rank" | "memory" | "node") as kind, number]:
            count = ranks if kind == "rank" else nodes
            if int(number) >= count:
                raise ConfigError(
                    f"target {target!r}: there are {count}", hint=f"{kind}s count from 0"
                )
            return kind, int(number)
    raise ConfigError(f"target {target!r}", hint=TARGETS)


TARGETS = "rank N, any rank, memory N, node N, memories, any process"


def _check(fault: Fault, where: str) -> None:
    if (fault.at_step is None) == (fault.between is None):
        raise ConfigError(f"{where}: give at_step or between, one of them", hint="at_step = 12")
    if fault.at_step is not None and fault.at_step < 1:
        raise ConfigError(f"{where}: at_step is {fault.at_step}", hint="steps count from 1")
    parse_bytes(fault.limit)
    if fault.between is not None and not 1 <= fault.between[0] <= fault.between[1]:
        raise ConfigError(
            f"{where}: between {list(fault.between)} is empty", hint="between = [5, 40]"
        )
    words = fault.target.split()
    is_valid = fault.target in ("any rank", "any process", "memories") or (
        len(words) == 2 and words[0] in ("rank", "memory", "node") and words[1].isdecimal()
    )
    if not is_valid:
        raise ConfigError(f"{where}: target {fault.target!r} is not known", hint=TARGETS)
    if fault.kind == "partition" and words[0] != "node":
        raise ConfigError(
            f"{where}: a partition cuts off a node, not {fault.target!r}", hint='target = "node 1"'
        )
    if fault.kind == "flip-bit" and words[-2:-1] != ["rank"] and fault.target != "any rank":
        raise ConfigError(
            f"{where}: a bit flips in a rank's weights, not in {fault.target!r}",
            hint='target = "rank 1"',
        )


def _plain(error: msgspec.ValidationError) -> str:
    text = str(error)
    return text[0].lower() + text[1:]


def _hint(values: dict[str, Any]) -> str:
    faults = values.get("faults")
    if not isinstance(faults, list):
        return "each fault is a table of its own: [[faults]]"
    for fault in faults:
        kind = fault.get("kind") if isinstance(fault, dict) else None
        if isinstance(kind, str) and kind not in KINDS:
            return did_you_mean(kind, KINDS) or f"kinds: {', '.join(KINDS)}"
        for key in fault if isinstance(fault, dict) else ():
            if key not in Fault.__struct_fields__:
                return did_you_mean(key, Fault.__struct_fields__) or "see examples/chaos/"
    for key in values:
        if key not in ChaosPlan.__struct_fields__:
            return did_you_mean(key, ChaosPlan.__struct_fields__) or "see examples/chaos/"
    return "see examples/chaos/"
