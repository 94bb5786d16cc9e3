"""Is a product on one core faster with weights in bfloat16 or in float32? By the size of the matrix and the tokens.

    python benchmarks/cpu_dtypes.py --out benchmarks/cpu/dtypes_x86.json
    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 python benchmarks/cpu_dtypes.py --out benchmarks/cpu/dtypes_x86_without_amx.json

`models.runnable.choose_dtype` follows from it. Microseconds of CPU, the best of some rounds, which other programs on
the machine change least.
"""

import argparse
import time
from functools import partial

import torch
from torch.nn.functional import linear

from cairn.bench.record import add_arguments, record

SHAPES = [(256, 768), (288, 768), (576, 576), (576, 1536), (1024, 1024), (1024, 3072), (2048, 2048)]
TOKENS = (1, 8, 64)
WORK, ROUNDS = 2e7, 7  # multiplications of a round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for inner, outer in SHAPES:
        times = {tokens: compared(tokens, inner, outer) for tokens in TOKENS}
        found[f"{inner}x{outer}"] = times
        print(inner, outer, times, flush=True)
    record({"microseconds": found}, options)


def compared(tokens: int, inner: int, outer: int) -> dict[str, float]:
    times = {}
    for dtype in (torch.bfloat16, torch.float32):
        x_TD, w_ED = torch.randn(tokens, inner).to(dtype), torch.randn(outer, inner).to(dtype)
        product = partial(linear, x_TD, w_ED)
        calls = max(3, int(WORK / (inner * outer * tokens)))
        times[str(dtype).removeprefix("torch.")] = round(
            min(_microseconds(product, calls) for _ in range(ROUNDS)), 1
        )
    return times


def _microseconds(product: partial[torch.Tensor], calls: int) -> float:
    began = time.process_time()
    for _ in range(calls):
        product()
    return 1e6 * (time.process_time() - began) / calls


if __name__ == "__main__":
    main()
