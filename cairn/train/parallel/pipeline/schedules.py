"""Every schedule by name, whole: the actions of all ranks, or an error that says why it cannot be.

schedule("1f1b", ranks=4, microbatches=8)
"""

from collections.abc import Callable
from typing import NamedTuple

from cairn.core.errors import ConfigError, did_you_mean
from cairn.train.parallel.pipeline.actions import Action, Placement, Schedule
from cairn.train.parallel.pipeline.dualpipe import dualpipev
from cairn.train.parallel.pipeline.orders import gpipe, interleaved, one_f_one_b
from cairn.train.parallel.pipeline.zero_bubble import zb_h1, zbv

Generator = Callable[[int, int, int], list[Action]]  # rank, ranks, microbatches


class Kind(NamedTuple):
    generate: Generator | None  # None: interleaved, which also takes the number of chunks
    placement: Placement
    chunks: int
    about: str


SCHEDULES: dict[str, Kind] = {
    "gpipe": Kind(gpipe, "loop", 1, "all forwards, then all backwards"),
    "1f1b": Kind(one_f_one_b, "loop", 1, "forwards and backwards take turns"),
    "interleaved": Kind(None, "loop", 2, "1f1b with several chunks of the model on each rank"),
    "zb-h1": Kind(zb_h1, "loop", 1, "1f1b with weight gradients in the gaps"),
    "zbv": Kind(zbv, "v", 2, "zero bubble: two chunks in a V, weight gradients in the gaps"),
    "dualpipev": Kind(dualpipev, "v", 2, "forward and backward in pairs that can overlap"),
}


def schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """`chunks` matters to `interleaved` alone; a V has two."""
    kind = SCHEDULES.get(name)
    if kind is None:
        hint = did_you_mean(name, SCHEDULES, otherwise=f"one of: {', '.join(SCHEDULES)}")
        raise ConfigError(f"no pipeline schedule is called {name!r}", hint=hint)
    chunks = kind.chunks if chunks is None else chunks
    _check(name, kind, ranks, microbatches, chunks)
    if kind.generate is None:
        orders = [interleaved(rank, ranks, microbatches, chunks) for rank in range(ranks)]
    else:
        orders = [kind.generate(rank, ranks, microbatches) for rank in range(ranks)]
    return Schedule(name, microbatches, tuple(map(tuple, orders)), chunks, kind.placement)


def forward_only(ranks: int, microbatches: int, chunks: int, placement: Placement) -> Schedule:
    """All microbatches through chunk after chunk, without a backward; any number of microbatches."""
    order = tuple(Action("F", chunk, m) for chunk in range(chunks) for m in range(microbatches))
    return Schedule("forward", microbatches, (order,) * ranks, chunks, placement)


def fewest_microbatches(name: str, ranks: int) -> int:
    """Minimum number of microbatches of a schedule."""
    return 2 * ranks if name == "dualpipev" else ranks if name == "interleaved" else 1


def _check(name: str, kind: Kind, ranks: int, microbatches: int, chunks: int) -> None:
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ConfigError(f"{name} with {value} {what}", hint="at least 1")
    if kind.generate is not None and chunks != kind.chunks:
        raise ConfigError(
            f"{name} has {kind.chunks} chunks on each rank, not {chunks}",
            hint="only `interleaved` takes another number",
        )
    least = fewest_microbatches(name, ranks)
    if microbatches < least:
        raise ConfigError(
            f"{name} on {ranks} ranks needs {least} microbatches, not {microbatches}",
            hint="more microbatches, or 1f1b, which takes any number",
        )
    if name == "interleaved" and microbatches % ranks:
        raise ConfigError(
            f"{microbatches} microbatches % {ranks} ranks = {microbatches % ranks}",
            hint="interleaved takes microbatches in rounds, one for each rank",
        )
