"""Kernels that were compiled ahead of time: a folder that Triton looks into before it compiles.

    DIR/built.json      what it was built with and for
    DIR/KEY/...         machine code and launchers, under the keys of Triton's own cache

A key is a hash of Triton itself, the kernel's source, its specialisation and the compiler's options, so what is found
is what would have been compiled; anything else is compiled as ever, into Triton's usual cache. `use` says which folder.
"""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import triton
from triton import knobs
from triton.runtime import cache
from triton.runtime.cache import FileCacheManager

import cairn
from cairn.core.errors import ConfigError

ENVIRONMENT = "CAIRN_KERNEL_CACHE"
MANIFEST = "built.json"
GROUP = "__grp__"  # Triton's own record of the files of a kernel; it has absolute paths


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Versions a folder was built with. They only explain a cache miss; Triton's keys decide."""

    cairn: str
    triton: str
    triton_key: str  # Triton's hash of itself
    triton_files: str  # names, sizes and times of the files that it hashed
    architecture: str
    gpu: str
    models: list[str]
    kernels: int
    launchers: int


class Lookups:
    """Cache hits and misses of Triton since `use`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.found = 0
        self.missed: list[str] = []

    def note(self) -> str:
        """Summary in one line for the startup log of an engine."""
        if not self.missed:
            return f"kernels: {self.found} found compiled in {self.folder}, none compiled here"
        why = self._why()
        names = ", ".join(sorted(set(self.missed))[:4])
        more = ", .." if len(set(self.missed)) > 4 else ""
        return (
            f"kernels: {self.found} found compiled in {self.folder}, {len(self.missed)} compiled here "
            f"({names}{more}): {why}"
        )

    def _why(self) -> str:
        built = self.manifest
        if built.triton != triton.__version__:
            return f"it was built with Triton {built.triton}, this is {triton.__version__}"
        if built.cairn != cairn.__version__:
            return f"it was built with Cairn {built.cairn}, this is {cairn.__version__}"
        return f"it was built for {', '.join(built.models)} on {built.gpu}"


def use(folder: Path) -> Lookups:
    """Make Triton look up kernels in this folder first. A folder that was not built raises ConfigError."""
    manifest = read_manifest(folder)
    if _BuiltCache.lookups is not None and _BuiltCache.lookups.folder == folder:
        return _BuiltCache.lookups  # of another engine of this process, such as a draft model's
    lookups = Lookups(folder, manifest)
    _BuiltCache.lookups = lookups
    knobs.cache.manager_class = _BuiltCache
    if triton_files() == manifest.triton_files:  # else Triton reads and hashes itself: 400 MB
        cache.triton_key = lambda: manifest.triton_key  # type: ignore[assignment]
    return lookups


def triton_files() -> str:
    """Changes whenever a file changes that `triton_key` reads; costs no more than listing them."""
    home = Path(triton.__file__).parent
    parts = [home / part for part in ("compiler", "backends", "language")]
    files = [
        *(path for part in parts for path in part.rglob("*.py")),
        home / "runtime" / "cache.py",
    ]
    listed = [
        (str(path.relative_to(home)), path.stat().st_size, int(path.stat().st_mtime))
        for path in sorted([*files, *(home / "_C").glob("libtriton.*")])
    ]
    return hashlib.sha256(repr((triton.__version__, listed)).encode()).hexdigest()


def use_configured(folder: str | None) -> Lookups | None:
    """The folder that was asked for, or that the environment names; None: neither, or one that has nothing."""
    if folder:
        return use(Path(folder).expanduser())
    named = os.environ.get(ENVIRONMENT)
    if not named:
        return None
    try:
        return use(Path(named).expanduser())
    except ConfigError as error:
        print(f"note: {ENVIRONMENT}: {error}; kernels are compiled here", file=sys.stderr)
        return None


def read_manifest(folder: Path) -> Manifest:
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{folder} holds no kernels that were built ahead: {error}",
            hint=f"build them: cairn kernels build --for sm_90 --out {folder}",
        ) from None


class _BuiltCache(FileCacheManager):
    """Triton makes one for each key. What the folder has is read there; the rest is kept where it always was."""

    lookups: Lookups | None = None

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._built: dict[str, str] = {}
        if self.lookups is not None and not override and not dump:
            self._built = _complete(self.lookups.folder / key)
        if self._built:
            self.key = key
        else:
            super().__init__(key, override=override, dump=dump)

    def get_file(self, filename: str) -> str | None:
        return self._built.get(filename) if self._built else super().get_file(filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Files of a compiled kernel. Triton's own record of them has absolute paths: the folder may have moved."""
        group = self._built or super().get_group(filename)
        if self.lookups is not None:
            if group:
                self.lookups.found += 1
            else:
                self.lookups.missed.append(filename.removesuffix(".json"))
        return group

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        if self._built:  # Triton has to compile anew
            self._built = {}
            super().__init__(self.key)
        return super().put(data, filename, binary)


def _complete(folder: Path) -> dict[str, str]:
    """The files of one key; none, where it was not written to the end: what Triton looks for is written last."""
    try:
        listed = os.scandir(folder)
        files = {entry.name: entry.path for entry in listed if not entry.name.startswith(GROUP)}
    except OSError:
        return {}
    ended = any(name.endswith((".json", ".so")) for name in files)
    return files if ended else {}
