"""Where a figure comes from: every benchmark writes its result through here.

    benchmarks/h200/NAME.json = {command, commit, date, device, versions, results}

A figure without its command, commit and versions cannot be repeated, so a result without them is not written.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--commit", help="the commit that runs, where there is no git")


def record(results: Any, options: argparse.Namespace) -> None:
    """Print the result; write it where `--out` says."""
    document = {
        "command": shlex.join(["python", *_repeatable(sys.argv)]),
        "commit": options.commit or _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": _device(),
        "versions": _versions(),
        "results": results,
    }
    text = json.dumps(document, indent=2) + "\n"
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
    print(text)


def _repeatable(argv: list[str]) -> list[str]:
    """The command without what only places the result."""
    kept, skip = [], False
    for argument in argv:
        if not skip and argument not in ("--out", "--commit"):
            kept.append(argument)
        skip = argument in ("--out", "--commit")
    return kept


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        sys.exit("error: no git here, so the commit is unknown\nhint: give it with --commit")
    return found.stdout.strip()


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {os.cpu_count()} CPUs"


def _versions() -> dict[str, str]:
    import importlib.metadata

    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers", "safetensors"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
