"""Launch plans of cross-entropy: sizes in, plans out; nothing runs here.

In pieces, `per_sm` programs share a multiprocessor. Each keeps the piece whose gradient is due in registers, 64 logits
for each thread, and has `stages` - 1 pieces on their way. Many small programs do better than few large ones: while
one adds up, another waits for memory. They all have to fit at the same time, so none may take more than `maxnreg`
registers for each thread.
"""

from typing import NamedTuple

from cairn.kernels.kernel import Variant
from cairn.kernels.loss.cross_entropy_kernels import loop_kernel, pieces_kernel


class Plan(NamedTuple):
    kernel: str = "pieces"  # or "loop"
    block: int = 4096
    warps: int = 2
    stages: int = 3
    per_sm: int = 8  # programs of "pieces" that a multiprocessor holds at the same time
    maxnreg: int = 128  # so that it can

    def pieces(self, columns: int) -> int:
        return -(-columns // self.block)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program: pieces in flight, reductions, and the hardware's reserve."""
        return (self.stages - 1) * self.block * 2 + 2048

    def constants(self, columns: int) -> dict[str, int]:
        """Constants of the kernel in pieces of equal length that begin at cache lines."""
        pieces = self.pieces(columns)
        size = -(-columns // (64 * pieces)) * 32  # in words of two
        width = 1 << (pieces - 1).bit_length()
        return dict(
            SIZE=size, BLOCK=self.block // 2, PIECES=pieces, WIDTH=width, STAGES=self.stages
        )


LOOP = Plan("loop")
PIECES = Plan()
CANDIDATES = [
    PIECES,
    Plan(block=2048, warps=1, per_sm=16),
    Plan(block=8192, warps=8, per_sm=2),
    LOOP,
]


def pieces_variant(plan: Plan, columns: int) -> Variant:
    types = {
        "words": "*i32", "logits": "*bf16", "targets": "*i64", "scale": "*fp32", "records": "*i64", "losses": "*fp32",
        "T": "i32", "V": "i32", "stride": "i32", "scale_stride": "i32", "ignored": "i32",
        "z_loss": "fp32",
    }  # fmt: skip
    return Variant(
        f"cross-entropy in pieces of {plan.block}, {columns} bf16, {plan.stages} stages, "
        f"{plan.per_sm} per multiprocessor",
        pieces_kernel,
        types,
        plan.constants(columns),
        {"num_warps": plan.warps, "maxnreg": plan.maxnreg},
        ("words", "logits", "targets", "records", "losses", "V", "stride"),
    )


def loop_variant(
    forward: bool, backward: bool, smooth: bool = False, raw: bool = False, weighed: bool = False
) -> Variant:
    types = {
        "logits": "*bf16", "targets": "*i64", "scale": "*fp32", "weights": "*fp32", "loss": "*fp32",
        "lse": "*fp32", "statistics": "*fp32",
        **dict.fromkeys(("T", "V", "stride", "scale_stride", "first_token", "ignored"), "i32"),
        **dict.fromkeys(("z_loss", "smoothing", "uniform"), "fp32"),
    }  # fmt: skip
    absent = (
        {"loss", "lse", "scale"} if raw else {"statistics"} if backward else {"statistics", "scale"}
    )
    absent = absent if weighed else absent | {"weights"}
    constants = dict(BLOCK=8192, FORWARD=forward, BACKWARD=backward, SMOOTH=smooth, STAGES=1)
    what = "statistics" if raw else "loss" if not backward else "both" if forward else "gradient"
    return Variant(
        f"cross-entropy loop, {what}{', smooth' if smooth else ''}{', weighed' if weighed else ''}",
        loop_kernel,
        {name: kind for name, kind in types.items() if name not in absent},
        {**constants, **dict.fromkeys(absent)},
        {"num_warps": 8},
        tuple({"logits", "targets", "loss", "lse", "statistics", "V", "stride"} - absent),
    )
