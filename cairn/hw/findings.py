"""The results that a check can have: ok, warn, fail.

The words that all checks share; no check and no evidence here. `fail` means that something will
not work or will compute wrongly; `warn`, that it will be slower or may fail under load.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from cairn.hw.evidence import HardwareEvidence

Status = Literal["ok", "warn", "fail"]


class HardwareFinding(msgspec.Struct, frozen=True):
    status: Status
    why: str
    fix: str | None = None


class HardwareVerdict(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    status: Status
    why: str
    fix: str | None


Check = Callable[
    [HardwareEvidence], HardwareFinding | None
]  # None: the question does not arise on this machine


def ok(why: str) -> HardwareFinding:
    return HardwareFinding("ok", why)


def warn(why: str, fix: str) -> HardwareFinding:
    return HardwareFinding("warn", why, fix)


def fail(why: str, fix: str) -> HardwareFinding:
    return HardwareFinding("fail", why, fix)
