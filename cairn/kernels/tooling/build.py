"""Many kernels, compiled at once, and what is already known about them.

    (kernel, variant) -> fingerprint -> kept? -> facts
                                         '-- no -> compile in a process of its own -> keep

Facts and texts are kept apart under the cache folder, because a check reads only the facts. A variant that makes
the compiler crash takes its process with it and nothing else. Prints nothing.
"""

import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import msgspec

from cairn.core.errors import CairnError
from cairn.hw.storage import cache_folder
from cairn.kernels.kernel import Variant
from cairn.kernels.tooling import catalogue
from cairn.kernels.tooling.compiled import Compiled

WORKERS = 2
CRASHED = "the compiler ended its own process"

Progress = Callable[[Compiled], None]


class Job(NamedTuple):
    """A variant by its name, which crosses the border of a process where the variant itself cannot."""

    kernel: str
    variant: str


def variants(kernel: str) -> list[Variant]:
    """Every configuration of the kernel that ships, those of the tuned tables included. Imports triton."""
    module = catalogue.load(kernel)
    declared = list(module.VARIANTS)
    names = [variant.name for variant in declared]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{kernel}.VARIANTS has several of the name {', '.join(repeated)}")
    tuned = module.tuned_variants() if hasattr(module, "tuned_variants") else ()
    return list({variant.name: variant for variant in (*declared, *tuned)}.values())


def jobs(kernels: Sequence[str]) -> list[Job]:
    return [Job(kernel, variant.name) for kernel in kernels for variant in variants(kernel)]


def build(
    jobs: Sequence[Job], *, workers: int = WORKERS, fresh: bool = False
) -> Iterator[Compiled]:
    """The facts of each job, without texts, in the order of completion: kept ones first."""
    left = []
    for job in jobs:
        kept = None if fresh else read(job, texts=False)
        if kept is None:
            left.append(job)
        else:
            yield kept
    if left:
        yield from _build_apart(left, max(1, min(workers, len(left), os.cpu_count() or 1)))


def build_one(job: Job, *, fresh: bool = False) -> Compiled:
    """Build one job with its texts in this process."""
    kept = None if fresh else read(job, texts=True)
    return kept if kept is not None else _build_and_keep(job)


def read(job: Job, *, texts: bool) -> Compiled | None:
    """Read the cached result of a job; None if it is missing or unreadable.

    It may have been kept for another kernel that ships the same variant.
    """
    path = _path(job)
    try:
        compiled = msgspec.json.decode(path.read_bytes(), type=Compiled)
        if texts:
            packed = path.with_suffix(".texts").read_bytes()
            compiled = msgspec.msgpack.decode(zlib.decompress(packed), type=Compiled)
    except (OSError, zlib.error, msgspec.DecodeError):
        return None
    return msgspec.structs.replace(compiled, kernel=job.kernel, variant=job.variant)


def _build_apart(left: Sequence[Job], workers: int) -> Iterator[Compiled]:
    """Build in worker processes; after a crash the jobs that may have been affected are retried one by one."""
    done: set[Job] = set()
    try:
        for job, compiled in _pooled(left, workers):
            done.add(job)
            yield compiled
    except BrokenProcessPool:
        for job in left:
            if job not in done:
                yield _alone(job)


def _pooled(left: Sequence[Job], workers: int) -> Iterator[tuple[Job, Compiled]]:
    with _pool(workers) as pool:
        running: dict[Future[Compiled], Job] = {pool.submit(_facts, job): job for job in left}
        while running:
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                yield running.pop(future), future.result()


def _alone(job: Job) -> Compiled:
    try:
        with _pool(1) as pool:
            return pool.submit(_facts, job).result()
    except BrokenProcessPool:
        return Compiled(kernel=job.kernel, variant=job.variant, error=CRASHED)


def _pool(workers: int) -> ProcessPoolExecutor:
    # Spawned, because torch's threads do not survive a fork.
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))


def _facts(job: Job) -> Compiled:
    """Result of a worker; an exception becomes the error of this job alone."""
    try:
        return _build_and_keep(job).without_texts()
    except Exception as problem:  # noqa: BLE001
        reason = f"{type(problem).__name__}: {problem}"
        return Compiled(kernel=job.kernel, variant=job.variant, error=reason)


def _build_and_keep(job: Job) -> Compiled:
    from cairn.kernels.tooling.compile import compile_variant

    compiled = compile_variant(_variant(job), job.kernel)
    path = _path(job)
    facts = msgspec.json.encode(compiled.without_texts())
    texts = zlib.compress(msgspec.msgpack.encode(compiled), level=6)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path.with_suffix(".texts"), texts)
        _write(path, facts)
    except OSError:
        pass  # a cache that cannot be written costs time, nothing else
    return compiled


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: two checks may run at once."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)


def _variant(job: Job) -> Variant:
    for variant in variants(job.kernel):
        if variant.name == job.variant:
            return variant
    raise CairnError(f"{job.kernel} has no variant '{job.variant}'", hint="was its file changed?")


def _path(job: Job) -> Path:
    from cairn.kernels.tooling.compile import fingerprint

    return cache_folder() / "kernels" / f"{fingerprint(_variant(job))}.json"
