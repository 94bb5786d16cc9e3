"""FLOPs of a training step and MFU.

    mfu = FLOPs of forward and backward, counted exactly, without recomputation / (seconds * peak)

Exact: attention counts the pairs that the causal mask and the documents leave, the output projection counts, lookups
and norms do not. torchtitan counts otherwise (attention as if nothing were masked, no embedding): `titan_flops` gives
its number, so that figures can be compared.
"""

from collections.abc import Sequence

from cairn.core.errors import HardwareError
from cairn.hw import ceilings
from cairn.hw.datasheet import CHIPS
from cairn.hw.roofline import dtype_name
from cairn.models.spec import ModelSpec


def step_flops(
    spec: ModelSpec, lengths: Sequence[int], frozen: bool = False, prefixes: Sequence[int] = ()
) -> int:
    """Forward and backward over documents of these lengths.

    `frozen`: weights have no gradients, as under an adapter, whose own few FLOPs are left out. `prefixes`: tokens of
    the document that each one goes on from, which it attends to; none, where each begins by itself.
    """
    documents = list(zip(lengths, prefixes or [0] * len(lengths), strict=True))
    flops_of = {one: spec.training_flops(*one) for one in set(documents)}
    gradients = 2 * spec.matmul_parameters() * sum(lengths)  # of the weights
    return sum(flops_of[one] for one in documents) - (gradients if frozen else 0)


def titan_flops(spec: ModelSpec, tokens: int, sequence: int) -> int:
    """6 (N - embedding) + 12 L H C S for each token; of experts N counts those that a token visits."""
    body = spec.active_parameters() - spec.vocab * spec.hidden
    attention = 12 * spec.layers * spec.heads * spec.head_dim * sequence
    return (6 * body + attention) * tokens


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Datasheet peak of a chip by its driver name; None if unknown."""
    for chip in CHIPS:
        if device_name in chip.drivers_call_it:
            return chip.flops_per_s.get(dtype)
    return None


def measured_flops(device: str, dtype: object) -> float | None:
    """The matmul rate that `cairn calibrate` has measured on this kind of device; None without it."""
    try:
        machine = ceilings.load()
    except HardwareError:
        return None
    rate = machine.matmul.get(dtype_name(dtype))
    return rate.value if rate is not None and machine.device.startswith(device) else None
