"""The C kernels of this folder, compiled once by the system's compiler and kept in the user's cache.

    product.c             pool, norms, gates, lookups                         when it is asked whether there are kernels
    kind.c -DKIND=Q4_1    the dot products of one type of weights, on ARM     when a matrix of that type is made
    speech.c              the decoder of speech                               when a Whisper is loaded

A library for this CPU alone (-march=native) has instructions that a packaged one leaves out. Its name is a hash of the
sources, the flags, the compiler and the CPU, so that a change of any of them compiles again. Where there is no compiler
`obstacle` says so, and weights are multiplied in the forms that torch has.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from cairn.core.errors import HardwareError
from cairn.hw.host import read_cpu

HERE = Path(__file__).parent
SOURCES = (
    *("product.c", "attention.h", "draft_head.h", "kind.c", "pool.h", "blocks.h", "dot.h"),
    *("pieces512.h", "dot512.h", "tiles_amx.h"),
    *("dot_neon.h", "quads_neon.h", "rows_neon.h", "pairs_neon.h"),
    *("levels_neon.h", "pieces_neon.h"),
    *("encoder.h", "encoder_attention.h", "float_tiles.h", "half_tiles.h"),
    *("vectors.h", "tiles_neon.h", "tiles_x86.h"),
    *("speech.c", "speech.h", "few_rows.h"),
)
ON_ARM = platform.machine().lower() in ("aarch64", "arm64")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    *("-O3", "-std=gnu11", "-shared", "-fPIC", "-march=native"),
    *("-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"),
    # GCC would order the products of `dot_neon.h` by sums, and each waits for the one before it.
    *(("-fno-schedule-insns",) if ON_ARM else ()),
)
COMPILE_TIMEOUT_S = 300


def cache_folder() -> Path:
    """CAIRN_CACHE, or the folder where this system keeps what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("CAIRN_CACHE") or Path(base) / "cairn") / "kernels"


@lru_cache(maxsize=1)
def obstacle() -> str | None:
    """Why there are no compiled kernels here, or None; compiles them when it is asked first."""
    try:
        library()
    except HardwareError as error:
        print(f"note: a model takes more memory and time here: {error}", file=sys.stderr)
        return str(error)
    return None


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Loaded into this process; compiled before if that was not done yet."""
    if platform.system() not in ("Linux", "Darwin"):
        raise HardwareError(f"no compiled CPU kernels for {platform.system()}")
    return _library("product")


@lru_cache(maxsize=1)
def speech_library() -> ctypes.CDLL:
    """Library of speech layers, for CPUs for which `library` has the encoder layers."""
    return _library("speech")


@lru_cache(maxsize=1)
def _said() -> None:
    """Print a note about the compilation once, for any number of libraries."""
    where = f"once for this machine, in some seconds; they are kept in {cache_folder()}"
    print(f"note: {_compiler()} compiles the CPU kernels, {where}", file=sys.stderr)


@lru_cache(maxsize=64)
def load_kind(kind: str) -> None:
    """Makes products know one type of weights, by its name in `dot_neon.h`; on other CPUs they know all."""
    core = library()
    if not hasattr(core, "cairn_use_kernel"):
        return
    made = _library("kind", kind)
    core.cairn_use_kernel(made.cairn_slot(), made.cairn_rows_dot)


def _library(source: str, kind: str = "") -> ctypes.CDLL:
    compiler = _compiler()
    name = "-".join([source, *re.findall(r"\w+", kind), _fingerprint(compiler)])
    made = cache_folder() / f"{name}.so"
    if not made.is_file():
        _compile(
            [compiler, *FLAGS, *([f"-DKIND={kind}"] if kind else []), str(HERE / f"{source}.c")],
            made,
        )
    try:
        return ctypes.CDLL(str(made))
    except OSError as error:
        raise HardwareError(
            f"{made} cannot be loaded: {error}", hint="delete it, and it is compiled again"
        ) from None


def _compiler() -> str:
    asked = os.environ.get("CC")
    found = next(
        (path for name in (asked, *COMPILERS) if name and (path := shutil.which(name))), None
    )
    if found is None:
        raise HardwareError(
            "there is no C compiler on this machine", hint="install gcc or clang, or set CC"
        )
    return found


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    cpu, stat = read_cpu(Path("/")), Path(compiler).resolve().stat()
    about = (FLAGS, compiler, stat.st_size, int(stat.st_mtime), cpu.model, cpu.features)
    digest.update(repr(about).encode())
    return digest.hexdigest()[:16]


def _compile(command: list[str], target: Path) -> None:
    """Into a file beside it first: another process may do the same at the same time."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            _said()
            made = Path(folder) / target.name
            done = subprocess.run(
                [*command, "-o", str(made), "-lm", "-lpthread"],
                capture_output=True,
                text=True,
                timeout=COMPILE_TIMEOUT_S,
                check=False,
            )
            if done.returncode:
                raise HardwareError(
                    f"{command[0]} cannot compile the CPU kernels: {_first_line(done.stderr)}",
                    hint="weights are multiplied by torch instead",
                )
            made.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HardwareError(
            f"the CPU kernels cannot be compiled: {error}",
            hint="set CAIRN_CACHE to a folder that you may write",
        ) from None


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if "error" in line), text.strip()[:200])
