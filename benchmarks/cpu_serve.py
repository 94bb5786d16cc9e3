"""How fast does SmolLM2-135M-Instruct serve on a CPU, beside `transformers` generate and llama.cpp in the same run?

    python benchmarks/cpu_serve.py --out benchmarks/cpu/smollm2.json

One stream and eight, greedy, the same prompts of random tokens for all three, which take turns in an order that
rotates. cairn and llama.cpp (package xllamacpp) read the same GGUF file, each in the form that it serves best;
transformers gets its weights dequantised to float32. Tokens are those that were asked for, per second, prompt included;
a ratio is taken within a round, because on a shared machine only that means something, and the median of the rounds is
what counts. Each round has prompts of its own: nobody gains from having seen one before. With --quiet, a turn waits for
a moment in which nobody else uses the CPUs, and is taken again if somebody did; `others` says how much that was.
Tokens per second of CPU time are recorded as well: with --threads 1 they say the same whoever else is there.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch

from cairn import LLM, SamplingParams
from cairn.bench.record import add_arguments, record
from cairn.models.export import export
from cairn.models.hub import resolve
from cairn.models.runnable import open_model

MODEL = "smollm2-135m-instruct"
STREAMS = (1, 8)
ASKED = "What is the capital of France?"
DISTURBED = 0.1  # share of the CPUs that others used during a turn
AGAIN = 4  # times that a disturbed turn is taken
Generate = Callable[[list[list[int]], int], None]  # prompts, how many tokens to answer each with


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--outputs", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--weights", default="auto", help="as of cairn serve")
    parser.add_argument("--quiet", type=float, default=0.0, help="seconds to wait for one, at most")
    add_arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with LLM(MODEL, device="cpu", max_num_seqs=max(STREAMS), max_model_len=1024,
             weights=options.weights) as llm, tempfile.TemporaryDirectory() as folder:  # fmt: skip
        ways: dict[str, Generate] = {
            "cairn": lambda prompts, outputs: ours(llm, prompts, outputs),
            "transformers": load_transformers(Path(folder)),
            "llama.cpp": load_llama_cpp(options.threads),
        }
        found = {f"{n}_streams": compare(ways, n, options) for n in STREAMS}
        about = {"model": MODEL, "threads": options.threads, "prompt": options.prompt,
                 "outputs": options.outputs, "weights": llm.notes, "answer": answer(llm)}  # fmt: skip
    import transformers
    import xllamacpp

    peers = {"transformers": transformers.__version__, "xllamacpp": xllamacpp.__version__}
    record(about | {"peers": peers} | found, options)


def compare(ways: dict[str, Generate], streams: int, options: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(streams)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    per_cpu: dict[str, list[float]] = {name: [] for name in ways}
    others: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(options.rounds + 1):  # the first warms up
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            rate, busy, own = best_turn(ways[name], streams, chance.randrange(1 << 30), options)
            where = f"{streams} streams, round {number} of {options.rounds}"
            log_line(
                f"{where}: {name} {rate:.1f} tokens/s, {own:.1f} per CPU second, others {busy:.0%}"
            )
            if number:
                rates[name].append(round(rate, 2))
                per_cpu[name].append(round(own, 2))
                others[name].append(round(busy, 3))
    ours = rates["cairn"]
    ratios = {
        peer: [round(a / b, 3) for a, b in zip(ours, rates[peer], strict=True)]
        for peer in names
        if peer != "cairn"
    }
    return {
        "tokens_per_s": {name: statistics.median(found) for name, found in rates.items()},
        "ratio": {peer: statistics.median(found) for peer, found in ratios.items()},
        "tokens_per_cpu_s": {name: statistics.median(found) for name, found in per_cpu.items()},
        "rounds": {
            "tokens_per_s": rates,
            "ratio": ratios,
            "tokens_per_cpu_s": per_cpu,
            "others": others,
        },
    }


def best_turn(
    way: Generate, streams: int, seed: int, options: argparse.Namespace
) -> tuple[float, float, float]:
    """Of the least disturbed turn: tokens per second, others' share of the CPUs, tokens per second of own CPU time."""
    found: list[tuple[float, float, float]] = []
    for attempt in range(AGAIN if options.quiet else 1):
        wait_for_quiet(options.quiet)
        chance = random.Random(seed + attempt)
        prompts = [
            [chance.randrange(1000, 40_000) for _ in range(options.prompt)] for _ in range(streams)
        ]
        watch, began = Watch(), time.perf_counter()
        way(prompts, options.outputs)
        seconds = time.perf_counter() - began
        tokens, (share, own) = streams * options.outputs, watch.shares()
        found.append((tokens / seconds, share, tokens / max(own, 1e-9)))
        if found[-1][1] < DISTURBED:
            break
    return min(found, key=lambda turn: turn[1])


def wait_for_quiet(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and psutil.cpu_percent(interval=0.5) > 100 * DISTURBED:
        pass


class Watch:
    """Who used the CPUs since it was made?"""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.before = self._now()

    def shares(self) -> tuple[float, float]:
        """The share of all CPUs' time that went to other processes, and the seconds that went to this one."""
        busy, mine, total = (b - a for a, b in zip(self.before, self._now(), strict=True))
        return max(busy - mine, 0.0) / total if total else 0.0, mine

    def _now(self) -> tuple[float, float, float]:
        times, own = psutil.cpu_times(), self.process.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return total - idle, own.user + own.system, total


def log_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ours(llm: LLM, prompts: list[list[int]], outputs: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
    found = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    assert all(len(one.outputs[0].token_ids) == outputs for one in found)


def answer(llm: LLM) -> str:
    asked = [{"role": "user", "content": ASKED}]
    (found,) = llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    return found.outputs[0].text


def load_transformers(folder: Path) -> Generate:
    import transformers

    transformers.logging.set_verbosity_error()
    export(open_model(MODEL).load("cpu", "float32").model, folder)
    peer: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], outputs: int) -> None:
        tokens = torch.tensor(prompts)
        found = peer.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            max_new_tokens=outputs,
        )
        assert found.shape[1] == tokens.shape[1] + outputs

    return generate


def load_llama_cpp(threads: int) -> Generate:
    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path = str(resolve(MODEL))
    params.n_ctx, params.n_parallel = 1024 * max(STREAMS), max(STREAMS)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup, params.verbosity = True, 0
    server: Any = xllamacpp.Server(params)
    pool = ThreadPoolExecutor(max(STREAMS))

    def one(prompt: list[int], outputs: int) -> None:
        wish = {
            "prompt": prompt,
            "n_predict": outputs,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        found = server.handle_completions(wish)
        used = found.get("usage", {}).get("completion_tokens", found.get("tokens_predicted"))
        assert used == outputs, found

    def generate(prompts: list[list[int]], outputs: int) -> None:
        list(pool.map(lambda prompt: one(prompt, outputs), prompts))

    return generate


if __name__ == "__main__":
    main()
