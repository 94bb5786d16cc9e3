"""Secret environment variables of a job, and files that only their owner may read.

HF_TOKEN, CAIRN_JOB_SECRET, WANDB_API_KEY ...   -->   a Secret in Kubernetes, mode 0600 on disk
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

SECRET = re.compile(
    r"TOKEN|SECRET|PASSW(OR)?D|CREDENTIAL|(API|ACCESS|PRIVATE|ADMIN|FLEET|PREFILL)_?KEY",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Return whether a variable is a secret, judged by its name."""
    return SECRET.search(name) is not None


def secrets_in(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in sorted(env.items()) if is_secret(name)}


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not is_secret(name)}


def write_private(path: Path, data: bytes) -> None:
    """Whole or not at all, with mode 0600 from the first byte: the environment of a job may hold secrets."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    fresh.replace(path)
