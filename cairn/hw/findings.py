"""The results that a check can have: ok, warn, fail.

The words that all checks share; no check and no evidence here. `fail` means that something will
not work or will compute wrongly; `warn`, that it will be slower or may fail under load.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from cairn.hw.evidence import Evidence

Status = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    status: Status
    why: str
    fix: str | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    status: Status
    why: str
    fix: str | None


Check = Callable[[Evidence], Finding | None]  # None: the question does not arise on this machine


def ok(why: str) -> Finding:
    return Finding("ok", why)


def warn(why: str, fix: str) -> Finding:
    return Finding("warn", why, fix)


def fail(why: str, fix: str) -> Finding:
    return Finding("fail", why, fix)
