"""16-bit types that this CPU multiplies at full speed in torch.

Decided by the features that the CPU names, not by a measurement: the same machine computes the same way every time.
"""

from functools import lru_cache
from pathlib import Path

from cairn.hw.host import read_cpu

# ARM's arithmetic in float16 is not among them: torch does not use it, and a Neoverse N1, which has it, takes 13 ms for
# what is 0.1 ms in float32 (1 x 576 by 576 x 1536).
FEATURES = {
    "bf16": {"avx512-bf16", "amx-bf16", "bf16"},
    "fp16": {"avx512-fp16", "amx-fp16"},
}


@lru_cache(maxsize=1)
def cpu_features() -> frozenset[str]:
    return frozenset(read_cpu(Path("/")).features)


def multiplies(dtype: str) -> bool:
    """Has the CPU of this machine an instruction for products of this type?"""
    return dtype not in FEATURES or not FEATURES[dtype].isdisjoint(cpu_features())
