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

from cairn.bench.record import add_arguments, record
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.llm import LLM

PROMPT = list(range(5, 69))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--share", type=float, default=0.4, help="of the GPU's memory, for each")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    add_arguments(parser)
    given = parser.parse_args()
    sleepers, rounds = [], []
    for name in given.model:
        began = time.monotonic()
        sleepers.append(made := Sleeper(name, given.device, given.share, given.rows))
        print(f"{name}: ready after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        made.sleep()  # the next one needs its memory
        rounds.append([made.wake_and_sleep() for _ in range(given.rounds)])
        print(f"{name}: (wake, sleep) {rounds[-1]} s", file=sys.stderr, flush=True)
    swaps = []
    sleepers[0].wake()
    for turn in range(given.rounds * 2 if len(sleepers) > 1 else 0):
        swaps.append(swap(sleepers[turn % 2], sleepers[1 - turn % 2]))
    found = {
        "models": given.model,
        "first_sleep_s": [one.first_sleep_s for one in sleepers],
        # Of each model, each round; a wake-up until a token has come.
        "wake_s": [[wake for wake, _ in of_model] for of_model in rounds],
        "sleep_s": [[sleep for _, sleep in of_model] for of_model in rounds],
        "swap_s": swaps,
        "same_tokens": all(one.same for one in sleepers),
    }
    record(found, given)


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

    def wake_and_sleep(self) -> tuple[float, float]:
        return self.wake(), self.sleep()

    def _token(self) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        return self.llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids


def swap(awake: Sleeper, asleep: Sleeper) -> float:
    return awake.sleep() + asleep.wake()


if __name__ == "__main__":
    main()
