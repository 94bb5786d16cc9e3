"""Tuning: measures a kernel's candidates on this GPU and writes the tables that `tuned` reads.

For each key of `tuning()` the call is prepared once and timed with every candidate on the same inputs. The first
candidate sets what is right: one that computes something else is out, whatever its speed, and so is one that does
not compile or does not fit. A later candidate has to be faster by more than the noise. Needs a CUDA device.
"""

import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from cairn.hw import timing
from cairn.kernels import tuned
from cairn.kernels.tooling import catalogue
from cairn.kernels.tooling.measure import first_line, replayed, require_gpu, rotation
from cairn.kernels.tuned import Config, Table, Tuning, trying

SHORT_S = 200e-6  # below this a launch from Python and a warm cache would be measured, too
NOISE = 0.01  # a gain of less than this keeps the earlier candidate
TOLERANCE = 2e-2  # candidates may add up in another order, no more


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    config: dict[str, Any]
    ms: float | None = None
    refused: str | None = None  # why it is out


class Result(msgspec.Struct, frozen=True, kw_only=True):
    kernel: str
    key: str
    trials: list[Trial]
    best: dict[str, Any] | None  # None: every candidate was refused

    @property
    def gain(self) -> float:
        """Speedup over the first candidate."""
        times = [trial.ms for trial in self.trials if trial.ms is not None]
        first = self.trials[0].ms
        return first / min(times) if times and first else 1.0


def tune(names: Sequence[str], budget_ms: float = 30.0, matching: str = "") -> Iterator[Result]:
    """Every key of every kernel named that can be tuned, or of those only that contain `matching`."""
    require_gpu()
    for name in names:
        if catalogue.kernels()[name].tunable:
            for tuning in catalogue.load(name).tuning():
                if matching not in tuning.key:
                    continue
                yield tune_key(name, tuning, budget_ms)


def tune_key(kernel: str, tuning: Tuning, budget_ms: float) -> Result:
    import torch

    before = torch.cuda.memory_allocated()
    try:
        first = tuning.prepare()
    except Exception as problem:  # noqa: BLE001  a shape that cannot be made is a result, too
        refused = Trial(config={}, refused=first_line(problem))
        return Result(kernel=kernel, key=tuning.key, trials=[refused], best=None)
    calls = rotation(tuning.prepare, first, torch.cuda.memory_allocated() - before)
    trials: list[Trial] = []
    expected = None
    for config in tuning.candidates:
        with trying(kernel, tuning.key, config):
            trial, result = _try(config, calls, expected, budget_ms)
        trials.append(trial)
        expected = result if expected is None else expected
    del calls, first, expected
    torch.cuda.empty_cache()
    return Result(kernel=kernel, key=tuning.key, trials=trials, best=choose(trials))


def choose(trials: Sequence[Trial]) -> dict[str, Any] | None:
    """The fastest; an earlier candidate stays unless a later one beats it by more than the noise."""
    best: Trial | None = None
    for trial in trials:
        if trial.ms is None:
            continue
        if best is None or best.ms is None or trial.ms < best.ms * (1 - NOISE):
            best = trial
    return best.config if best else None


def merged(table: Table | None, results: Sequence[Result], command: str) -> Table:
    """The old table with what has been measured now put in."""
    from cairn.hw.versions import package_version

    kernels = {name: dict(keys) for name, keys in table.kernels.items()} if table else {}
    for result in results:
        if result.best is not None:
            kernels.setdefault(result.kernel, {})[result.key] = result.best
    versions = {name: package_version(name) or "" for name in ("torch", "triton")}
    return Table(
        device=require_gpu(),
        command=command,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions=versions,
        kernels={name: dict(sorted(kernels[name].items())) for name in sorted(kernels)},
    )


def save(results: Sequence[Result], command: str, folder: Any = tuned.TABLES) -> Any:
    """Write the table of this GPU and return its path."""
    path = folder / f"{tuned.slug(require_gpu())}.json"
    old = tuned.read_table(path) if path.exists() else None
    tuned.write_table(merged(old, results, command), path)
    tuned.forget()
    return path


def _try(
    config: Config, calls: Sequence[Callable[[], object]], expected: Any, budget_ms: float
) -> tuple[Trial, Any]:
    """Check a candidate's result, then measure it."""
    import torch

    try:
        result = _tensors(calls[0]())
        torch.cuda.synchronize()
        wrong = _difference(result, expected)
        if wrong is not None:
            return Trial(config=dict(config), refused=wrong), None
        once = timing.measure(calls[0], device="cuda", budget_ms=budget_ms)
        if once.median_s < SHORT_S:
            once = replayed(calls, budget_ms)
        return Trial(config=dict(config), ms=once.median_s * 1e3), result
    except Exception as problem:  # noqa: BLE001  too much shared memory, a compiler error: not this one
        return Trial(config=dict(config), refused=first_line(problem)), None


def _tensors(result: object) -> list[Any]:
    import torch

    if isinstance(result, torch.Tensor):
        return [result.detach().clone()]
    if isinstance(result, tuple | list):
        return [tensor for part in result for tensor in _tensors(part)]
    return []


def _difference(result: list[Any], expected: list[Any] | None) -> str | None:
    """Why the result cannot be right: not finite, or not what the first candidate gave."""
    for place, tensor in enumerate(result):
        if not tensor.is_floating_point():
            continue
        wide = tensor.float()
        if expected is None:
            if wide.isnan().any():
                return "gives NaN"
            continue
        apart = (wide - expected[place].float()).norm() / expected[place].float().norm()
        if not float(apart) <= TOLERANCE:
            return f"differs from the first candidate by {float(apart):.2g}"
    return None
