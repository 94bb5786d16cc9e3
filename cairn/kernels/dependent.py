"""A kernel that starts while its predecessor ends: programmatic dependent launch, for Hopper.

A decode step is hundreds of kernels of a few microseconds, and each start costs about one. A kernel that is launched as
a dependent is on its multiprocessors, past its first instructions, when its predecessor's results are in. Rules:

    begin(OVERLAP) comes before anything that reads or writes what another kernel writes or reads
    what may be prefetched is asked for before it: begin(OVERLAP, True), read that, then behind(OVERLAP, True)
    a kernel waits for its predecessor only; that one has waited for its own, and so on

so every kernel that is launched with `pdl` calls `begin`, even if it needs nothing from its predecessor. A kernel may
prefetch what nothing that still runs writes: weights while nobody trains, and what was written before the last
kernel that was launched in the ordinary way, which starts when all before it have ended. Weights were pushed out of
the caches since the last step, and a trip to the memory takes as long as the rest of a small kernel: ask early.
CAIRN_OVERLAP=0 switches it off, to see what it is worth.
"""

import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.dispatch import capability


@triton.jit
def begin(OVERLAP: tl.constexpr, EARLY: tl.constexpr = tl.constexpr(False)):  # noqa: B008
    """Let the successor start as soon as all programs of this kernel have; wait for the predecessor, or not yet."""
    if OVERLAP:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()


@triton.jit
def behind(OVERLAP: tl.constexpr, EARLY: tl.constexpr):
    """Wait for the predecessor, if `begin` has not. Once it has ended this costs nothing."""
    if OVERLAP and EARLY:
        gdc_wait()


def pdl(device: torch.device) -> dict[str, bool]:
    """Options of a launch: a dependent one where the device can, and the kernel's own constant."""
    off = os.environ.get("TRITON_INTERPRET") == "1" or os.environ.get("CAIRN_OVERLAP") == "0"
    overlap = capability(device) >= (9, 0) and not off
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}
