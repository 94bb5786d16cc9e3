"""Compilation result of a kernel as data. Imports no compiler, so that it can be read anywhere."""

import msgspec

from cairn.kernels.kernel import Expect
from cairn.kernels.tooling.machine_code import Occupancy

STAGES = ("source", "ttir", "ttgir", "llir", "ptx", "sass")


class Source(msgspec.Struct, frozen=True):
    """A function of the kernel, as it stands in its file."""

    path: str
    first_line: int
    text: str


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """Compilation result of a variant. If `error` is set, there is no machine code and the rest is empty."""

    kernel: str
    variant: str
    expect: Expect = "none"
    allowed_spills: int = 0  # bytes, as the variant says
    error: str | None = None
    registers: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    shared_bytes: int = 0
    warps: int = 0  # per block, helpers of warp specialisation included
    occupancy: Occupancy | None = None
    advisories: list[str] = []  # what ptxas remarks
    opcodes: dict[str, int] = {}
    mix: dict[str, int] = {}
    multiplies: bool = False  # there is a tl.dot in it
    register_operand: bool = False  # a wgmma reads its left operand from registers
    overwritten_barriers: list[int] = []  # bytes of shared memory from its begin
    stage_ms: dict[str, float] = {}
    tools: str = ""  # versions of Triton and ptxas
    sources: list[Source] = []
    stages: dict[str, str] = {}  # the texts; empty where only the facts were asked for

    def without_texts(self) -> "Compiled":
        return msgspec.structs.replace(self, sources=[], stages={})
