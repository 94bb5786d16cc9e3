"""Names that stand for models: `chat` is cairn-tiny today, and for five requests of a hundred its successor (canary).

    [[aliases]]                       [[aliases]]
    name = "chat"                     name = "chat"
    model = "cairn-tiny"              model = "cairn-tiny-2"
    weight = 95                       weight = 5

Requests of one `user` always get the same model; the others are spread evenly in the order in which they come. The
server sees its own name: it is written into the body, and everything else stays as it was. Pure.
"""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Annotated

import msgspec
from msgspec import Meta

from cairn.core.errors import ConfigError

GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, fill the unit interval evenly
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Alias(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    model: str
    weight: Annotated[float, Meta(ge=0)] = 1.0


class Aliases:
    def __init__(self, given: Sequence[Alias] = ()) -> None:
        self.targets: dict[str, tuple[list[str], list[float]]] = {}  # models, cumulative shares
        for name in dict.fromkeys(one.name for one in given):
            same = [one for one in given if one.name == name]
            total = sum(one.weight for one in same)
            if not total:
                raise ConfigError(
                    f"all weights of the alias {name!r} are 0", hint="give one model a weight"
                )
            shares = [share / total for share in accumulate(one.weight for one in same)]
            self.targets[name] = [one.model for one in same], shares

    @property
    def names(self) -> list[str]:
        return list(self.targets)

    def target(self, name: str | None, number: int, user: bytes) -> str | None:
        """The model that this request gets; None: the name is no alias. `number`: of the request, in order."""
        if name not in self.targets:
            return None
        models, shares = self.targets[name]
        if user:
            at = int.from_bytes(blake2b(user, digest_size=8).digest()) / 2**64
        else:
            at = number * GOLDEN % 1.0
        return next(
            model for model, share in zip(models, shares, strict=True) if at < share or share >= 1
        )


def with_model(body: bytes, model: str) -> bytes:
    """The same request for another model."""
    fields = _decode_fields(body)
    return msgspec.json.encode(fields | {"model": model})
