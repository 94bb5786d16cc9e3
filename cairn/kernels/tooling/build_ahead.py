"""Compiles what launches will ask for, without a GPU, into a folder that `cairn.kernels.built` reads.

    launches (seen on an absent GPU) -> machine code   by Triton's own compiler, under its own keys
                                     -> launchers      a small C module for each list of arguments, with gcc

Keys are Triton's own, so what is found later is what would have been compiled then.
"""

import hashlib
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import triton
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime.build import _build, platform_key
from triton.runtime.cache import FileCacheManager, get_cache_manager, triton_key

import cairn
from cairn.core.errors import ConfigError, HardwareError
from cairn.kernels.built import MANIFEST, Manifest, triton_files
from cairn.kernels.tooling.absent_gpu import Launch

LAUNCHER = "__triton_launcher"
# The empty library that stands for the driver's has nothing that is needed, and is to be loaded all the same.
LINKED = ["-Wl,--no-as-needed", "-l:libcuda.so.1"]

See = Callable[[], list[Launch]]  # what is launched; a worker process gets it by name


class Built(NamedTuple):
    """A compiled kernel, or the reason why it failed."""

    name: str
    error: str = ""


def by_hash(launches: Sequence[Launch]) -> dict[str, Launch]:
    """Each specialisation once: models share some. The same names in every process."""
    return {_hash(launch): launch for launch in launches}


def _hash(launch: Launch) -> str:
    text = f"{launch.source.hash()} {sorted(launch.options.items(), key=lambda option: option[0])}"
    return hashlib.sha256(text.encode()).hexdigest()


def build(launches: Mapping[str, Launch], see: See, out: Path, workers: int) -> Iterator[Built]:
    """Machine code of these of the launches that `see` returns, in the order of completion; then their launchers.

    Half of the time goes into Triton's front end, which is Python: so it runs in processes, and each of them looks for
    itself what is launched, because what describes a launch cannot be sent to another process.
    """
    _prepare(out)
    sources: dict[str, str] = {}
    workers = max(1, min(workers, len(launches)))
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin, (see, str(out))) as pool:
        futures = {pool.submit(_compile_named, name): launch for name, launch in launches.items()}
        for future in as_completed(futures):
            name = futures[future].source.name
            try:
                sources[future.result()] = LAUNCHER
            except Exception as problem:  # noqa: BLE001  the compiler raises what it likes
                last = (str(problem).strip().splitlines() or [""])[-1]
                yield Built(name, f"{type(problem).__name__}: {last}")
            else:
                yield Built(name)
    store_launchers(sources, out, workers)


def build_here(launches: Mapping[str, Launch], out: Path) -> None:
    """The same in this process, one after another; an error of the compiler is raised."""
    _prepare(out)
    with _into(out):
        sources = {_compile(launch): LAUNCHER for launch in launches.values()}
    store_launchers(sources, out, workers=1)


def store_launchers(sources: dict[str, str], out: Path, workers: int) -> None:
    """C modules by their source, and the one that all of them need."""
    sources[(Path(nvidia.dirname) / "driver.c").read_text()] = "cuda_utils"
    with _into(out), _absent_libcuda(), ThreadPoolExecutor(workers) as threads:
        list(threads.map(lambda pair: _store_module(*pair), sources.items()))


def write_manifest(out: Path, architecture: str, gpu: str, models: Sequence[str]) -> Manifest:
    """Last: a folder without one is not used."""
    kernels = len(list(out.glob("*/*.cubin")))
    launchers = len(list(out.glob(f"*/{LAUNCHER}*")))
    manifest = Manifest(
        cairn=cairn.__version__,
        triton=triton.__version__,
        triton_key=triton_key(),
        triton_files=triton_files(),
        architecture=architecture,
        gpu=gpu,
        models=list(models),
        kernels=kernels,
        launchers=launchers,
    )
    (out / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return manifest


def _prepare(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / MANIFEST).unlink(missing_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot write to {out}: {reason}", hint="name another folder") from None


@contextmanager
def _into(out: Path) -> Generator[None]:
    """Triton's cache is this folder, and holds only what a launch reads."""
    with knobs.cache.scope(), knobs.compilation.scope():
        _set_cache(out)
        yield


def _set_cache(out: Path) -> None:
    knobs.cache.dir = str(out)
    knobs.cache.manager_class = FileCacheManager
    knobs.compilation.store_binary_only = True


_seen: dict[str, Launch] = {}  # of a worker process


def _begin(see: See, out: str) -> None:
    """Initialise a worker process. Its warnings are suppressed because the parent printed them."""
    with redirect_stderr(StringIO()):
        _seen.update(by_hash(see()))
    _set_cache(Path(out))


def _compile_named(name: str) -> str:
    return _compile(_seen[name])


def _compile(launch: Launch) -> str:
    """The C source of its launcher, once its machine code is in the cache."""
    compiled: Any = triton.compile(launch.source, target=launch.target, options=launch.options)
    constants, signature = dict(launch.source.constants), dict(launch.source.signature)
    described = getattr(compiled.metadata, "tensordesc_meta", None)
    return nvidia.make_launcher(constants, signature, described)


def _store_module(source: str, name: str) -> None:
    """Store a module as Triton's `compile_module_from_src` does, without loading it, which needs a driver."""
    key = hashlib.sha256((source + platform_key()).encode("utf-8")).hexdigest()
    cache = get_cache_manager(key)
    file = f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if cache.get_file(file) is not None:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.c"
        path.write_text(source)
        library = _build(
            name,
            str(path),
            folder,
            nvidia.library_dirs(),
            nvidia.include_dirs,
            nvidia.libraries,
            LINKED,
        )
        cache.put(Path(library).read_bytes(), file, binary=True)


@contextmanager
def _absent_libcuda() -> Generator[None]:
    """Launchers are linked against the driver's library by name. Without a driver an empty one has that name."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise HardwareError(
            "no C compiler was found", hint="install gcc: launchers are small C modules"
        )
    with tempfile.TemporaryDirectory() as folder, knobs.nvidia.scope():
        empty = Path(folder) / "empty.c"
        empty.write_text("")
        library = Path(folder) / "libcuda.so.1"
        flags = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
        subprocess.run([compiler, str(empty), *flags], check=True)
        knobs.nvidia.libcuda_path = folder
        nvidia.libcuda_dirs.cache_clear()
        nvidia.library_dirs.cache_clear()
        try:
            yield
        finally:
            nvidia.libcuda_dirs.cache_clear()
            nvidia.library_dirs.cache_clear()
