"""Evidence file: a model's log probabilities of fixed texts, comparable between machines. Pure Python.

    Evidence    who was asked, and an Observation of each probe
    Observation the tokens of one probe, and at each scored place the log-probabilities of some tokens

A place always has the token that stands there; the rest are the likeliest ones, as many as the source gave.
"""

from pathlib import Path

import msgspec

from cairn.core.errors import DataError

VERSION = 1
Row = dict[int, float]  # token id -> log-probability


class Observation(msgspec.Struct, frozen=True):
    probe: str
    ids: list[int]
    first: int  # ids[first:] are scored, each after those before it
    rows: list[Row]  # one for each scored token; empty: the source gave nothing that could be read

    def at(self, place: int) -> int:
        """The token that stands at a scored place."""
        return self.ids[self.first + place]


class ModelEvidence(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    source: str  # a sentence: the engine here, a server, the plain path
    fingerprint: str = ""  # of the weights' files; empty: not known
    versions: dict[str, str] = {}
    version: int = VERSION
    observations: list[Observation] = []

    def observation(self, probe: str) -> Observation | None:
        return next((one for one in self.observations if one.probe == probe), None)

    @property
    def places(self) -> int:
        return sum(len(one.rows) for one in self.observations)


def write_evidence(evidence: ModelEvidence, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(evidence), indent=1) + b"\n")


def read_evidence(file: Path) -> ModelEvidence:
    try:
        found = msgspec.json.decode(file.read_bytes(), type=ModelEvidence)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}", hint="check the path") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} is no record of `cairn verify`: {error}",
            hint="`cairn verify MODEL --record FILE` writes one",
        ) from None
    if found.version != VERSION:
        raise DataError(
            f"{file} has format {found.version}; this version reads {VERSION}",
            hint="write the record again with this version",
        )
    return found
