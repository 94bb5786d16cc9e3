#!/usr/bin/env python3
"""The C compiler of the tests: a text that was compiled before, with the same flags, is not compiled again.

    kept_cc.py FLAGS SOURCE.c -o TARGET LIBRARIES  ->  TARGET, compiled by cc or copied from $KEPT_CC

Every worker of the suite has a cache of its own, as have some tests, and each of them would compile the CPU kernels
anew: 7 s of CPU time. `conftest.py` makes this CC. Whoever wants the same at the same time waits for the first.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

CPU = Path("/proc/cpuinfo")  # -march=native compiles for what this says


def main(words: list[str]) -> int:
    text = preprocessed(words)
    if text is None:
        return subprocess.call(["cc", *words])
    target = Path(words[words.index("-o") + 1])
    kept = Path(os.environ["KEPT_CC"]) / fingerprint(words, text)
    with open(f"{kept}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if kept.exists():
            shutil.copy(kept, target)
            return 0
        status = subprocess.call(["cc", *words])
        if status == 0:
            shutil.copy(target, f"{kept}.new")
            os.replace(f"{kept}.new", kept)
        return status


def preprocessed(words: list[str]) -> bytes | None:
    """What the compiler would read, if this compiles and links one source; None for any other command."""
    sources = [word for word in words if word.endswith((".c", ".o", ".a"))]
    if "-o" not in words or [Path(name).suffix for name in sources] != [".c"]:
        return None
    done = subprocess.run(["cc", "-E", *without_target(words)], capture_output=True)
    return None if done.returncode else done.stdout


def fingerprint(words: list[str], text: bytes) -> str:
    about = [
        line
        for line in CPU.read_text().splitlines()
        if line.startswith(("model", "flags", "Features"))
    ]
    version = subprocess.run(["cc", "--version"], capture_output=True).stdout
    parts = [text, version, repr(without_target(words)).encode(), repr(sorted(set(about))).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def without_target(words: list[str]) -> list[str]:
    at = words.index("-o")
    return words[:at] + words[at + 2 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
