"""How these programs write their results: with `--out`, beside the command, commit and versions that made them.

benchmarks/h200/NAME.json = {command, commit, date, device, versions, results}
"""

import argparse
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec

from cairn.bench.record import origin, require_commit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--commit", help="the commit that runs, where there is no git")


def record(results: Any, options: argparse.Namespace) -> None:
    """Print the result; write it where `--out` says."""
    require_commit(options.commit)
    command = shlex.join(["python", *_repeatable(sys.argv)])
    document = msgspec.to_builtins(origin(command, _device(), options.commit))
    text = json.dumps(document | {"results": results}, indent=2) + "\n"
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


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {os.cpu_count()} CPUs"
