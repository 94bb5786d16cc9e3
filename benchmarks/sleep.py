"""How long does a model take to wake up, and to make room for another one?

    python benchmarks/sleep.py --model random:qwen3-8b --model random:llama-3.1-8b --out benchmarks/h200/sleep.json

Every model is an engine of this process, and one is awake at a time. A wake-up counts until the first token of an
answer that the model gave before it slept, and that has to be the same. A swap is the sleep of one model and the wake
of the other. The first sleep of a model, which pins the host memory for its weights, is reported apart. Runs on a CPU,
too.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from cairn.bench.record import add_arguments, record
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.llm import LLM

PROMPT = list(range(5, 69))
BEGAN_S = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--share", type=float, default=0.4, help="of the GPU's memory, for each")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    add_arguments(parser)
    given = parser.parse_args()
    sleepers: list[Sleeper] = []
    swaps: list[float] = []
    for name in given.model:
        say(f"{name}: starts")
        sleepers.append(made := Sleeper(name, given.device, given.share, given.rows))
        say(f"{name}: ready")
        made.sleep()  # the next one needs its memory
        say(f"{name}: asleep for the first time after {made.first_sleep_s:.2f} s")
        for _ in range(given.rounds):
            made.rounds.append((made.wake(), made.sleep()))
            say(f"{name}: wake and sleep %.3f and %.3f s" % made.rounds[-1])
        record(found(given.model, sleepers, swaps), given, show=False)
    if len(sleepers) > 1:
        sleepers[0].wake()
        for turn in range(given.rounds * 2):
            swaps.append(swap(sleepers[turn % 2], sleepers[1 - turn % 2]))
            say(f"swap {swaps[-1]:.3f} s")
    record(found(given.model, sleepers, swaps), given)


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN_S:6.1f} s  {text}", file=sys.stderr, flush=True)


def found(
    models: Sequence[str], sleepers: Sequence["Sleeper"], swaps: Sequence[float]
) -> dict[str, object]:
    """As far as it was measured: a run that is cut short has left what it had."""
    return {
        "models": models[: len(sleepers)],
        "first_sleep_s": [one.first_sleep_s for one in sleepers],
        # Of each model, each round; a wake-up until a token has come.
        "wake_s": [[wake for wake, _ in one.rounds] for one in sleepers],
        "sleep_s": [[sleep for _, sleep in one.rounds] for one in sleepers],
        "swap_s": swaps,
        "same_tokens": all(one.same for one in sleepers),
    }


class Sleeper:
    def __init__(self, model: str, device: str, share: float, rows: int) -> None:
        self.llm = LLM(
            model,
            device=device,
            enable_sleep_mode=True,
            gpu_memory_utilization=share,
            max_num_seqs=rows,
        )
        self.same, self.first_sleep_s = True, 0.0
        self.rounds: list[tuple[float, float]] = []  # seconds of a wake-up and of a sleep
        self._before = self._token()

    def sleep(self) -> float:
        began = time.monotonic()
        self.llm.sleep()
        took = time.monotonic() - began
        self.first_sleep_s = self.first_sleep_s or took
        return took

    def wake(self) -> float:
        """Until the first token."""
        began = time.monotonic()
        self.llm.wake_up()
        token = self._token()
        took = time.monotonic() - began
        self.same = self.same and token == self._before
        return took

    def _token(self) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        return self.llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids


def swap(awake: Sleeper, asleep: Sleeper) -> float:
    return awake.sleep() + asleep.wake()


if __name__ == "__main__":
    main()
