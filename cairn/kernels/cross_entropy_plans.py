"""How is cross-entropy laid over the chip, and how are its kernels compiled? Sizes in, plans out; nothing runs here.

In pieces, `per_sm` programs of 256 threads share a multiprocessor: 3 of them hold 48 KiB of logits in registers and
have as much again on its way, which covers the time that they wait for each other. They fit if none takes more than
80 registers per thread.
"""

from typing import NamedTuple

from cairn.kernels.cross_entropy_kernels import loop_kernel, pieces_kernel
from cairn.kernels.kernel import Variant


class Plan(NamedTuple):
    kernel: str = "pieces"  # or "loop"
    block: int = 8192
    warps: int = 8
    stages: int = 3
    per_sm: int = 3  # programs of "pieces" that a multiprocessor holds at the same time
    maxnreg: int = 80  # so that it can

    def pieces(self, columns: int) -> int:
        return -(-columns // self.block)

    def constants(self, columns: int) -> dict[str, int]:
        """Of the kernel in pieces."""
        pieces = self.pieces(columns)
        width = 1 << (pieces - 1).bit_length()
        return dict(BLOCK=self.block, PIECES=pieces, WIDTH=width, STAGES=self.stages)


LOOP = Plan("loop")
PIECES = Plan()
CANDIDATES = [
    PIECES,
    Plan(per_sm=2, maxnreg=128),
    Plan(stages=4, per_sm=2, maxnreg=128),
    Plan(block=4096, warps=4, per_sm=6),
    Plan(block=16384, warps=16, per_sm=1, maxnreg=128),
    LOOP,
]


def pieces_variant(plan: Plan, columns: int, logits: str = "bf16") -> Variant:
    types = {
        "logits": f"*{logits}", "targets": "*i64", "scale": "*fp32", "records": "*i64", "losses": "*fp32",
        "T": "i32", "V": "i32", "stride": "i32", "scale_stride": "i32", "ignored": "i32",
        "z_loss": "fp32",
    }  # fmt: skip
    return Variant(
        f"cross-entropy in pieces of {plan.block}, {columns} {logits}, {plan.stages} stages, "
        f"{plan.per_sm} per multiprocessor",
        pieces_kernel,
        types,
        plan.constants(columns),
        {"num_warps": plan.warps, "maxnreg": plan.maxnreg},
        ("logits", "targets", "records", "losses", "V", "stride"),
    )


def loop_variant(forward: bool, backward: bool, smooth: bool = False, raw: bool = False) -> Variant:
    types = {
        "logits": "*bf16", "targets": "*i64", "scale": "*fp32", "loss": "*fp32", "lse": "*fp32",
        "statistics": "*fp32",
        **dict.fromkeys(("T", "V", "stride", "scale_stride", "first_token", "ignored"), "i32"),
        **dict.fromkeys(("z_loss", "smoothing", "uniform"), "fp32"),
    }  # fmt: skip
    absent = (
        {"loss", "lse", "scale"} if raw else {"statistics"} if backward else {"statistics", "scale"}
    )
    constants = dict(BLOCK=8192, FORWARD=forward, BACKWARD=backward, SMOOTH=smooth, STAGES=1)
    what = "statistics" if raw else "loss" if not backward else "both" if forward else "gradient"
    return Variant(
        f"cross-entropy loop, {what}{', smooth' if smooth else ''}",
        loop_kernel,
        {name: kind for name, kind in types.items() if name not in absent},
        {**constants, **dict.fromkeys(absent)},
        {"num_warps": 8},
        tuple({"logits", "targets", "loss", "lse", "statistics", "V", "stride"} - absent),
    )
