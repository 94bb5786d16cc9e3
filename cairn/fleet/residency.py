"""Residency of models on one machine: requested models are awake as far as they fit into memory.

    asleep --asked for, and there is room--> awake --idle, or another one needs the room--> asleep

Room is made by those that were used longest ago, idle ones first. One that is busy finishes what it has, and takes
nothing new, once another has waited for a turn. Pinned models never sleep. Pure: no process, no clock.
"""

from collections.abc import Sequence

import msgspec

from cairn.core.errors import ConfigError
from cairn.core.units import format_bytes

TURN_S = 2.0  # that a model keeps its place while another one waits for it


class Resident(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of a model."""

    name: str
    bytes: int  # while it is awake
    asleep_bytes: int = 0  # that it keeps while it sleeps
    awake: bool = False
    pinned: bool = False
    answers: bool = True  # false: its server starts again, and cannot be sent to sleep
    busy: int = 0  # requests that it answers
    waiting_since_s: float | None = None  # of the oldest request that it cannot take yet
    used_s: float = 0.0  # when it was last asked

    @property
    def can_sleep(self) -> bool:
        return self.awake and self.answers and not self.pinned

    @property
    def held(self) -> int:
        return self.bytes if self.awake else self.asleep_bytes

    @property
    def given_back(self) -> int:
        """Memory that sleeping releases and waking needs."""
        return self.bytes - self.asleep_bytes


class Moves(msgspec.Struct, frozen=True):
    sleep: list[str] = []  # first
    wake: list[str] = []
    yielding: list[str] = []  # busy ones that take nothing new, to sleep when they are done


def plan(models: Sequence[Resident], memory: int, now_s: float, idle_s: float) -> Moves:
    """Next moves; the longest-waiting model comes first."""
    free = memory - sum(one.held for one in models)
    moves = Moves([], [], [])
    if free < 0:  # a server was started again, and is awake
        victims, room = _victims(models, moves, -free)
        moves.sleep.extend(one.name for one in victims if not one.busy)
        moves.yielding.extend(one.name for one in victims if one.busy)
        free += room
    wanted = [one for one in models if not one.awake and one.waiting_since_s is not None]
    for one in sorted(wanted, key=lambda one: one.waiting_since_s or 0.0):
        victims, room = _victims(models, moves, one.given_back - free)
        busy = [other.name for other in victims if other.busy]
        if free + room < one.given_back:
            continue
        if busy and now_s - (one.waiting_since_s or now_s) < TURN_S:
            continue
        free += room - one.given_back  # promised, so that no other takes it
        moves.sleep.extend(other.name for other in victims if not other.busy)
        moves.yielding.extend(busy)
        moves.wake.extend([] if busy else [one.name])
    taken = {*moves.sleep, *moves.yielding}
    for one in models:
        quiet = one.can_sleep and not one.busy and one.waiting_since_s is None
        if quiet and one.name not in taken and now_s - one.used_s >= idle_s:
            moves.sleep.append(one.name)
    return moves


def _victims(models: Sequence[Resident], moves: Moves, needed: int) -> tuple[list[Resident], int]:
    """Models to put to sleep to free memory: idle before busy, then least recently used."""
    taken = {*moves.sleep, *moves.yielding}
    able = [one for one in models if one.can_sleep and one.name not in taken]
    chosen, room = list[Resident](), 0
    for one in sorted(able, key=lambda one: (one.busy > 0, one.used_s)):
        if room >= needed:
            break
        chosen.append(one)
        room += one.given_back
    return chosen, room


def check_room(models: Sequence[Resident], memory: int) -> None:
    """Refuse models of which one could never be awake: it does not fit beside what the others always keep."""
    for one in models:
        always = [other.bytes if other.pinned else other.asleep_bytes for other in models]
        always[models.index(one)] = one.bytes
        if sum(always) <= memory:
            continue
        kept = sum(always) - one.bytes
        needed = f"{format_bytes(one.bytes)}, and the others keep {format_bytes(kept)}"
        raise ConfigError(
            f"{one.name} needs {needed} at all times (asleep, or pinned); there are {format_bytes(memory)}",
            hint="fewer models or pins, smaller caches (--num-gpu-blocks-override), or more --models-memory",
        )
