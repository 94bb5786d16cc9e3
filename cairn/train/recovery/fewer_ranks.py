"""A launched job that has fewer ranks than its recipe asks for: in which layout it goes on, and who has nothing to do.

    recipe dp 2 x pp 2, a node of two is lost:  2 ranks  ->  dp 1 x pp 2 (`templates`);  of 3 ranks one is idle

A launcher that shrinks starts as many ranks as there are nodes for; an argv with `--dp {world}` says so itself, a
pipeline or shards need a template. Ranks beyond it wait for the end of the run, so that a node that comes back finds
all of them again.
"""

import time
from collections.abc import Callable

import msgspec

from cairn.core.errors import ConfigError
from cairn.core.job_ledger_files import read_ledger
from cairn.train.config import Train
from cairn.train.recovery.local_layouts import layouts_that_fit
from cairn.train.recovery.templates import Fits, best_for

LOOK_S = 1.0


def for_ranks(config: Train, ranks: int, fits: Fits | None = None) -> Train:
    """The recipe in the layout for so many ranks: its own, if there are enough."""
    layout = config.parallel
    if ranks >= layout.world():
        return config
    best = best_for(layout, ranks, fits or layouts_that_fit(config))
    if best is None:
        raise ConfigError(
            f"{ranks} ranks are left of {layout.world()}, and no layout smaller than {layout.words()} fits them",
            hint="tp and cp stay as they are; give the role more nodes at least, or restart.policy requeue",
        )
    return msgspec.structs.replace(config, parallel=best)


def wait_idle(config: Train, rank: int, log_line: Callable[[str], None]) -> None:
    """Until the run has ended; a launcher that wants its ranks back ends this one before."""
    log_line(
        f"rank {rank} has nothing to do in {config.parallel.words()}; it waits for the end of the run"
    )
    while True:
        ledger = read_ledger(config.folder)
        if ledger is not None and ledger.state in ("ended", "failed"):
            return
        time.sleep(LOOK_S)
