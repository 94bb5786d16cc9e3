"""An engine's worker process whose device only keeps time: the real worker, its sockets and its messages, no model.

    EngineProcesses(config, spawn=paced_spawn(Pace("smollm2-135m-instruct", limits, step_s=0.004)))

For measuring what stands in front of an engine that has a process of its own: here the worker's cost is another
process's. As everywhere, the worker reads its `Boot` from standard input; its pace is in its arguments.
"""

import subprocess
import sys
import time

import msgspec

from cairn.bench.paced_engine import paced_engine
from cairn.models.runnable import OpenModel, open_model
from cairn.models.shards import ALONE, Shards
from cairn.serve.config import EngineConfig
from cairn.serve.engine import worker
from cairn.serve.engine.loop import Engine, Output
from cairn.serve.engine.process import Spawn, spawn_worker
from cairn.serve.engine.request import Limits
from cairn.serve.engine.start import Started


class StepPace(msgspec.Struct, frozen=True):
    model: str  # whose tokenizer there is
    limits: Limits
    step_s: float
    together: int = 0  # requests that have to be there before the first step; 0: any


def paced_spawn(pace: StepPace) -> Spawn:
    command = (
        sys.executable,
        "-P",
        "-m",
        "cairn.bench.paced_worker",
        msgspec.json.encode(pace).decode(),
    )

    def spawn(boot: worker.Boot) -> "subprocess.Popen[bytes]":
        return spawn_worker(boot, command)

    return spawn


def held_until(engine: Engine, requests: int) -> Engine:
    """No step before so many are there: fewer in a step would be more steps, and the engine's cost not the same."""
    step, started = engine.step, False

    def held() -> list[Output]:
        nonlocal started
        inside = engine.scheduler.running + engine.scheduler.waiting
        started = inside == requests or started
        if not started:
            time.sleep(0.001)
            return []
        outputs = step()
        started = engine.has_work
        return outputs

    engine.step = held  # type: ignore[method-assign]
    return engine


def main() -> int:
    pace = msgspec.json.decode(sys.argv[1], type=StepPace)

    def start(
        config: EngineConfig, shards: Shards = ALONE, opened: OpenModel | None = None
    ) -> Started:
        opened = opened or open_model(pace.model)
        engine = paced_engine(opened, pace.limits, lambda step: pace.step_s)
        if pace.together:
            held_until(engine, pace.together)
        return Started(engine, opened, [])

    worker.start = start
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
