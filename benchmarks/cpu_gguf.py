"""How fast does a GGUF file serve on a CPU beside llama.cpp: one stream, eight, a prompt, memory, time to ready?

    python benchmarks/cpu_gguf.py FILE.gguf ... --out benchmarks/cpu/gguf_x86.json

Each side is a process of its own that answers commands; they take turns on the same file with the same random prompts,
and a ratio is taken within a round, because on a shared machine only that means something; on a very busy one, the
ratio by seconds of CPU with --threads 1, where nobody waits for other threads. llama.cpp runs through the package
llama-cpp-python, built for this CPU (CMAKE_ARGS=-DGGML_NATIVE=ON). With --busy, eight streams run once more
beside as many busy loops as there are threads. With --alone llama.cpp is left out. Beside the time to ready stand the
seconds of CPU that it took, which other programs on the machine change less. Of files that `random_gguf.py` made the
record has the commands that make them.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from multiprocessing import Process
from pathlib import Path
from typing import Any

import gguf
import psutil
from random_gguf import COMMAND

from cairn.bench.record import add_arguments, record

# Streams, tokens of a prompt, tokens of an answer.
CASES = {"one_stream": (1, 32, 16), "eight_streams": (8, 32, 8), "prefill": (1, 512, 1)}
CONTEXT = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count() or 1)
    parser.add_argument("--busy", action="store_true", help="eight streams beside busy loops, too")
    parser.add_argument("--alone", action="store_true", help="without llama.cpp")
    parser.add_argument("--weights", default="auto", help="their form here: auto, int8, float")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--side", choices=("cairn", "llama.cpp"), help="internal: serve commands")
    add_arguments(parser)
    options = parser.parse_args()
    if options.side:
        serve_commands(options)
        return
    if not options.alone and find_spec("llama_cpp") is None:
        parser.error("there is no llama_cpp here: pip install llama-cpp-python, or use --alone")
    found: dict[str, Any] = {}
    made_by = "; ".join(filter(None, map(command_of, options.files)))
    for file in options.files:  # written after each: a file takes minutes
        found[file.name] = compare(file, options)
        how = {"threads": options.threads, "rounds": options.rounds, "weights": options.weights}
        how["cases"] = {case: CASES[case] for case in options.cases}
        record({**how, "files": found}, options, made_by)


def command_of(file: Path) -> str | None:
    """What made a file with random weights, as its metadata says."""
    field = gguf.GGUFReader(file).get_field(COMMAND)
    return None if field is None else field.contents()


# -- the two that are compared, each in a process of its own ------------------------------------------


def serve_commands(options: argparse.Namespace) -> None:
    """Lines of JSON in: prompts and how many tokens to answer each with; lines of seconds out, and of CPU time."""
    file, threads = options.files[0], options.threads
    if options.side == "cairn":
        run = start_cairn(file, threads, options.weights)
    else:
        run = start_llama_cpp(file, threads)
    run([[1, 2, 3]], 2)
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        began = time.perf_counter(), time.process_time()
        run(command["prompts"], command["outputs"])
        print(time.perf_counter() - began[0], time.process_time() - began[1], flush=True)


def start_cairn(file: Path, threads: int, weights: str) -> Any:
    import torch

    from cairn import LLM, SamplingParams

    torch.set_num_threads(threads)
    llm = LLM(
        str(file),
        device="cpu",
        max_num_seqs=8,
        max_model_len=CONTEXT,
        enable_prefix_caching=False,
        weights=weights,
    )

    def run(prompts: list[list[int]], outputs: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = llm.generate(asked, params, use_tqdm=False)
        assert all(len(one.outputs[0].token_ids) == outputs for one in found)

    return run


def start_llama_cpp(file: Path, threads: int) -> Any:
    """Greedy, eight sequences in one batch, as its server does it."""
    import llama_cpp.llama_cpp as ll

    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(str(file).encode(), ll.llama_model_default_params())
    params = ll.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max = CONTEXT * 8, 2048, 8
    params.n_threads = params.n_threads_batch = threads
    context = ll.llama_init_from_model(model, params)
    width = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    import numpy as np

    batch = ll.llama_batch_init(2048, 0, 1)

    def fill(rows: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(rows)
        for i, (token, place, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, place, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, int(wanted)
        assert ll.llama_decode(context, batch) == 0

    def likeliest(index: int) -> int:
        logits = np.ctypeslib.as_array(ll.llama_get_logits_ith(context, index), (width,))
        return int(logits.argmax())

    def run(prompts: list[list[int]], outputs: int) -> None:
        ll.llama_memory_clear(ll.llama_get_memory(context), True)
        fill(
            [
                (token, place, s, place == len(prompt) - 1)
                for s, prompt in enumerate(prompts)
                for place, token in enumerate(prompt)
            ]
        )
        ends = [sum(map(len, prompts[: s + 1])) - 1 for s in range(len(prompts))]
        tokens = [likeliest(end) for end in ends]
        for step in range(outputs - 1):
            rows = enumerate(zip(tokens, prompts, strict=True))
            fill([(token, len(prompt) + step, s, True) for s, (token, prompt) in rows])
            tokens = [likeliest(s) for s in range(len(prompts))]

    return run


# -- the comparison -----------------------------------------------------------------------------------


class Side:
    """One of the two, and what it took to be ready."""

    def __init__(self, name: str, file: Path, options: argparse.Namespace) -> None:
        began = time.perf_counter()
        command = [sys.executable, __file__, str(file), "--side", name]
        command += ["--threads", str(options.threads), "--weights", options.weights]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.wait("ready")
        self.ready_s = round(time.perf_counter() - began, 2)
        used = psutil.Process(self.process.pid).cpu_times()
        self.ready_cpu_s = round(used.user + used.system, 2)

    def wait(self, expected: str | None = None) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if expected is None or line.strip() == expected:
                return line
        raise SystemExit(f"{self.process.args} ended")

    def seconds(self, prompts: list[list[int]], outputs: int) -> tuple[float, float]:
        assert self.process.stdin is not None
        print(
            json.dumps({"prompts": prompts, "outputs": outputs}),
            file=self.process.stdin,
            flush=True,
        )
        clock, cpu = self.wait().split()
        return float(clock), float(cpu)

    def resident_mb(self) -> dict[str, int]:
        """What it holds, how much of that are mapped files, and the most that it ever held."""
        memory = psutil.Process(self.process.pid).memory_info()
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        most = int(status.partition("VmHWM:")[2].split()[0]) >> 10
        return {"resident": memory.rss >> 20, "file": memory.shared >> 20, "peak": most}

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def compare(file: Path, options: argparse.Namespace) -> dict[str, Any]:
    names = ("cairn",) if options.alone else ("cairn", "llama.cpp")
    sides = {name: Side(name, file, options) for name in names}
    found: dict[str, Any] = {"file_mb": file.stat().st_size >> 20}
    found["ready_s"] = {name: side.ready_s for name, side in sides.items()}
    found["ready_cpu_s"] = {name: side.ready_cpu_s for name, side in sides.items()}
    for case in options.cases:
        found[case] = turns(sides, case, options.rounds)
    if options.busy:
        loops = [Process(target=busy, daemon=True) for _ in range(options.threads)]
        for loop in loops:
            loop.start()
        found["eight_streams_busy"] = turns(sides, "eight_streams", options.rounds)
        for loop in loops:
            loop.terminate()
    found["memory_mb"] = {name: side.resident_mb() for name, side in sides.items()}
    for side in sides.values():
        side.close()
    return found


def turns(sides: dict[str, Side], case: str, rounds: int) -> dict[str, Any]:
    streams, prompt, outputs = CASES[case]
    chance = random.Random(streams)
    rates, work = (
        {name: [] for name in sides} for _ in range(2)
    )  # tokens a second, and a second of CPU
    for number in range(rounds + 1):  # the first warms up
        prompts = [[chance.randrange(100, 40_000) for _ in range(prompt)] for _ in range(streams)]
        for name in list(sides)[:: 1 if number % 2 else -1]:
            tokens = streams * (prompt if outputs == 1 else outputs)
            clock, cpu = (tokens / seconds for seconds in sides[name].seconds(prompts, outputs))
            said = f"{case} round {number}: {name} {clock:.1f} tokens/s, {cpu:.1f} a second of CPU"
            print(said, file=sys.stderr, flush=True)
            rates[name] += [round(clock, 1)] if number else []
            work[name] += [round(cpu, 1)] if number else []
    medians = {name: statistics.median(rate) for name, rate in rates.items()}
    found: dict[str, Any] = {"tokens_per_s": medians, "rounds": rates, "per_cpu_second": work}
    if len(rates) == 2:
        found |= {"ratio": _ratio(rates), "cpu_ratio": _ratio(work)}
    return found


def _ratio(rates: dict[str, list[float]]) -> float:
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    return round(statistics.median(ratios), 2)


def busy() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
