"""How fast is a product with packed weights on one core: each GGUF type, with one token and with eight?

    python benchmarks/cpu_products.py --out benchmarks/cpu/products_arm.json

Seconds of CPU, the best of some rounds, which other programs on the machine change least. Weights are random bytes,
more than a cache holds. Found are products of a weight and an activation in a nanosecond, and GB of weights a second.
"""

import argparse
import time
from typing import Any

import torch

from cairn.bench.record import add_arguments, record
from cairn.kernels.cpu.packed_product import Blocks, PackedMatrix

# Bytes and values of a block.
KINDS = {
    "Q8_0": (34, 32), "Q5_0": (22, 32), "Q4_1": (20, 32), "Q4_0": (18, 32), "IQ4_NL": (18, 32),
    "Q4_K": (144, 256), "Q5_K": (176, 256), "Q6_K": (210, 256),
}  # fmt: skip
COLUMNS = 2048
SIZE = 1 << 26  # bytes of weights
ROUND_S, ROUNDS = 0.05, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8])
    add_arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for kind in options.kinds:
        found[kind] = measured(kind, options.tokens)
        print(kind, found[kind], flush=True)
    record({"columns": COLUMNS, "kinds": found}, options)


def measured(kind: str, tokens_of_steps: list[int]) -> dict[str, dict[str, float]]:
    """By tokens; the masked bytes make scales that are finite."""
    size_of_block, values = KINDS[kind]
    row_bytes = COLUMNS // values * size_of_block
    bytes_NB = torch.randint(0, 256, (SIZE // row_bytes // 4 * 4, row_bytes), dtype=torch.uint8)
    matrix = PackedMatrix([Blocks(kind, bytes_NB & 0x3B, COLUMNS)])
    found = {}
    for tokens in tokens_of_steps:
        seconds = best_seconds(matrix, torch.randn(tokens, COLUMNS))
        per_ns = tokens * matrix.outputs * COLUMNS / seconds / 1e9
        found[str(tokens)] = {
            "products_per_ns": round(per_ns, 2),
            "gb_per_s": round(matrix.nbytes / seconds / 1e9, 2),
        }
    return found


def best_seconds(matrix: PackedMatrix, x_MK: torch.Tensor) -> float:
    """Of one product."""
    matrix.product(x_MK)
    best = float("inf")
    for _ in range(ROUNDS):
        began, count = time.process_time(), 0
        while time.process_time() - began < ROUND_S:
            matrix.product(x_MK)
            count += 1
        best = min(best, (time.process_time() - began) / count)
    return best


if __name__ == "__main__":
    main()
