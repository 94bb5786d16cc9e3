"""Nodes that are not used until they were inspected: who, why, since when, for how long.

    strike, strike, strike within a day  ->  cordoned  --time is over, or a person lifts it-->  free again

A list is a value; adding to it gives another one. `save` and `load` keep it in a file, whole or not at all. No clock in
here: every function is told the time (seconds since 1970, so that it means the same on every machine).
"""

from pathlib import Path

import msgspec

from cairn.core.errors import DataError

DAY_S = 86_400.0


class Strike(msgspec.Struct, frozen=True):
    node: str
    at: float
    why: str


class Cordon(msgspec.Struct, frozen=True):
    node: str
    since: float
    why: str
    until: float | None = None  # None: until it is lifted


class Cordons(msgspec.Struct, frozen=True):
    strikes: tuple[Strike, ...] = ()
    cordons: tuple[Cordon, ...] = ()
    lifted: dict[str, float] = {}  # node -> when: what was before that is forgiven

    def excluded(self, now: float) -> dict[str, str]:
        """Node -> why it is not used now."""
        return {c.node: c.why for c in self.cordons if c.until is None or now < c.until}

    def strike(
        self, node: str, now: float, why: str, most: int = 3, within_s: float = DAY_S
    ) -> "Cordons":
        """Record a failure of a node; the `most`th within the period cordons it."""
        recent = tuple(s for s in self.strikes if now - s.at < within_s)
        strikes = (*recent, Strike(node, now, why))
        mine = [s for s in strikes if s.node == node]
        struck = msgspec.structs.replace(self, strikes=strikes)
        if len(mine) < most or node in self.excluded(now):
            return struck
        return struck.cordon(node, now, f"{len(mine)} failures; the last: {why}", within_s)

    def cordon(self, node: str, now: float, why: str, for_s: float | None = None) -> "Cordons":
        others = tuple(c for c in self.cordons if c.node != node)
        until = None if for_s is None else now + for_s
        return msgspec.structs.replace(self, cordons=(*others, Cordon(node, now, why, until)))

    def lift(self, node: str, now: float) -> "Cordons":
        """Remove the cordon and the recorded failures of a node."""
        return Cordons(
            tuple(s for s in self.strikes if s.node != node),
            tuple(c for c in self.cordons if c.node != node),
            {**self.lifted, node: now},
        )


def load(path: Path) -> Cordons:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Cordons)
    except FileNotFoundError:
        return Cordons()
    except msgspec.DecodeError as error:
        raise DataError(
            f"{path} is damaged: {error}", hint="remove it to use all nodes again"
        ) from None


def save(path: Path, cordons: Cordons) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}")
    fresh.write_bytes(msgspec.json.encode(cordons))
    fresh.replace(path)
