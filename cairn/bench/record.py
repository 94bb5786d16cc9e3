"""Where a figure comes from: a result without its command, commit and versions cannot be repeated.

    {command, commit, date, device, versions, ...results}

Knows nothing about what was measured.
"""

import datetime
import subprocess
from pathlib import Path

import msgspec

from cairn.core.errors import UsageError
from cairn.hw.versions import read_versions


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    command: str
    commit: str
    date: str  # UTC, ISO 8601
    device: str
    versions: dict[str, str]


def origin(command: str, device: str, commit: str | None = None) -> Origin:
    versions = msgspec.to_builtins(read_versions(Path("/")))
    return Origin(
        command=command,
        commit=commit or current_commit() or "unknown",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        device=device,
        versions={name: value for name, value in versions.items() if value},
    )


def require_commit(commit: str | None) -> None:
    """Refuse before an hour of measuring, and not after it."""
    if commit is None and current_commit() is None:
        raise UsageError(
            "no git here, so the commit that is measured is unknown",
            hint="give it with --commit",
        )


def current_commit() -> str | None:
    """The commit of Cairn's own sources, with a mark when they have been changed since."""
    here = Path(__file__).parents[2]
    head = _git(here, "rev-parse", "--short", "HEAD")
    if not head:
        return None
    return f"{head}+changes" if _git(here, "status", "--porcelain", "--", "cairn") else head


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:  # not installed
        return None
    return done.stdout.strip() if done.returncode == 0 else None
