"""What does a long prompt do to answers under way: on one engine, and with prefill in a process of its own?

    python benchmarks/separation.py --out benchmarks/cpu/separation.json

Some requests answer from the start; long prompts come in between. The gaps between tokens of those answers are
compared, in the same run and in turns: all on one engine, then on two (tokens must be equal). One thread for each
engine. Then long prompts come one by one, with nothing else to do, and are handed over whole or chunk by chunk, in
turns: what passes between the end of the prefill and the first token that is decoded?
"""

import argparse
import os
import statistics
from typing import Any

import msgspec
import numpy as np
import torch

from cairn.bench.record import add_arguments, record
from cairn.serve.config import EngineConfig
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start
from cairn.serve.separation.pair import Separated
from cairn.serve.separation.prefill import Ask
from cairn.serve.separation.timed_answers import Answer, generate_alone

STREAMS, LONG = 4, 6  # answers from the start, prompts that come in between


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="cairn-tiny")
    parser.add_argument("--transport", default="shm", choices=["tcp", "shm", "nixl"])
    parser.add_argument("--prompt", type=int, default=600, help="tokens of a long prompt")
    parser.add_argument("--tokens", type=int, default=60, help="of an answer")
    parser.add_argument("--every", type=float, default=0.3, help="seconds between long prompts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a prefill step")
    parser.add_argument("--handovers", type=int, default=10, help="of each kind, one by one")
    add_arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = EngineConfig(
        model=options.model,
        device="cpu",
        dtype="float32",
        weights="float",
        max_num_seqs=32,
        num_gpu_blocks_override=1024,
        enable_prefix_caching=False,
    )
    load = os.getloadavg()[0]
    engine = start(config).engine
    found: dict[str, list[list[Answer]]] = {"one engine": [], "separated": []}
    chunked = msgspec.structs.replace(config, max_num_batched_tokens=options.chunk)
    with Separated.of(config, transport=options.transport, prefill=chunked) as pair:
        pair.generate(*workload(options, -1))  # warm
        for number in range(options.rounds):
            asks, at = workload(options, number)
            found["one engine"].append(generate_alone(engine, asks, at))
            found["separated"].append(pair.generate(asks, at))
            assert [one.tokens for one in found["one engine"][-1]] == [
                one.tokens for one in found["separated"][-1]
            ]
        handovers = hand_over(options, pair)
    results: dict[str, Any] = {name: summary(rounds) for name, rounds in found.items()}
    results |= {"transport": options.transport, "load_average_before": load}
    results["chunk_tokens"], results["handover"] = options.chunk, handovers
    arrivals = [one.arrival for answers in found["separated"] for one in answers if one.arrival]
    results["not_moved"] = [one.why_not for one in arrivals if one.why_not is not None]
    results["handover_ms_median"] = round(1e3 * statistics.median(a.moved_s for a in arrivals), 2)
    results["bytes_of_a_long_prompt"] = max(one.bytes for one in arrivals)
    record(results, options)


def workload(options: argparse.Namespace, number: int) -> tuple[list[Ask], list[float]]:
    draw = np.random.default_rng(number + 1)

    def ask(name: str, prompt: int, tokens: int) -> Ask:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        words = draw.integers(0, 1000, prompt).tolist()
        return Ask(id=f"{number}-{name}", prompt=words, params=params)

    asks = [ask(f"stream{n}", 16, options.tokens) for n in range(STREAMS)]
    asks += [ask(f"long{n}", options.prompt, 4) for n in range(LONG)]
    return asks, [0.0] * STREAMS + [options.every * (n + 1) for n in range(LONG)]


def hand_over(options: argparse.Namespace, pair: Separated) -> dict[str, dict[str, float]]:
    """The same prompts, whole and streamed."""
    found: dict[str, list[Answer]] = {"whole": [], "streamed": []}
    for number in range(options.handovers):
        asks, _ = workload(options, 1000 + number)
        for name in sorted(found, reverse=bool(number % 2)):  # neither is always the first
            pair.streamed = name == "streamed"
            one = msgspec.structs.replace(asks[-1], id=f"{name}{number}")
            found[name] += pair.generate([one])
    assert [one.tokens for one in found["whole"]] == [one.tokens for one in found["streamed"]]
    return {name: summary_of_handovers(answers) for name, answers in found.items()}


def summary_of_handovers(answers: list[Answer]) -> dict[str, float]:
    arrivals = [one.arrival for one in answers if one.arrival is not None]
    left = sorted(1e3 * one.moved_s for one in arrivals)
    second = sorted(1e3 * one.gaps_s[0] for one in answers)
    whole = [1e3 * (one.at_s[1] - one.asked_s) for one in answers]
    return {
        "streamed": sum(one.streamed for one in arrivals),
        "pages_behind_the_prefill_ms_median": round(statistics.median(left), 2),
        "pages_behind_the_prefill_ms_worst": round(left[-1], 2),
        "first_to_second_token_ms_median": round(statistics.median(second), 2),
        "first_to_second_token_ms_worst": round(second[-1], 2),
        "decoded_token_ms_median": round(
            statistics.median(1e3 * gap for one in answers for gap in one.gaps_s[1:]), 2
        ),
        "ttft_ms_median": round(1e3 * statistics.median(one.ttft_s for one in answers), 1),
        "asked_to_second_token_ms_median": round(statistics.median(whole), 1),
    }


def summary(rounds: list[list[Answer]]) -> dict[str, float]:
    """Of the answers that were under way; of the long prompts, how long the first token took."""
    gaps = [1e3 * gap for answers in rounds for one in answers[:STREAMS] for gap in one.gaps_s[1:]]
    first = [1e3 * one.ttft_s for answers in rounds for one in answers[STREAMS:]]
    return {
        "gap_ms_median": round(statistics.median(gaps), 2),
        "gap_ms_p99": round(float(np.quantile(gaps, 0.99)), 2),
        "gap_ms_worst": round(max(gaps), 2),
        "long_prompts_ttft_ms_median": round(statistics.median(first), 1),
    }


if __name__ == "__main__":
    main()
