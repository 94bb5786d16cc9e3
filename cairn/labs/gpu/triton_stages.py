"""What becomes of a Triton kernel on its way to the machine? Compiled here, stage by stage, without a GPU.

    Python -> TTIR -> TTGIR -> LLVM IR -> PTX -> SASS
              what    who      threads    virtual  machine code
                      does it             registers

One small kernel of ours is compiled twice. Told that its pointer and its count are multiples of 16, the compiler may
load 16 bytes at once: 2048 numbers of 2 bytes over 128 threads are 2 loads of 128 bits each. Not told so, it must load
one number at a time, because a mask could end anywhere: 16 loads of 16 bits.
"""

from collections.abc import Mapping
from typing import Any

from cairn.labs.lab import Check, Outcome, Rows, Table, Words, described
from cairn.labs.workbench import Workbench

BLOCK, THREADS, BYTES, WIDEST = 2048, 128, 2, 16


def loads_per_thread(width_bytes: int) -> int:
    """Instructions that a thread needs for its share of the block."""
    return BLOCK // THREADS * BYTES // width_bytes


def run(bench: Workbench) -> Outcome:
    bench.step("compiling, told what is aligned")
    specialised = _compile(("values", "count"))
    bench.step("compiling, told nothing")
    general = _compile(())
    rows = [
        [
            stage,
            len(specialised.stages[stage].splitlines()),
            len(general.stages[stage].splitlines()),
        ]
        for stage in specialised.stages
    ]
    rows += [
        [f"ms: {stage}", ms, general.stage_ms.get(stage, 0.0)]
        for stage, ms in specialised.stage_ms.items()
    ]
    return Outcome(
        checks=[
            Check(
                what=Words("stages from Python to SASS", "从 Python 到 SASS 的阶段数"),
                predicted=6.0,
                measured=float(len(specialised.stages)),
                unit="",
            ),
            Check(
                what=Words("128-bit loads when alignment is known", "已知对齐时的 128 位 load 数"),
                predicted=float(loads_per_thread(WIDEST)),
                measured=_count(specialised.opcodes, "LDG", "128"),
                unit="",
            ),
            Check(
                what=Words("16-bit loads when it is not", "未知对齐时的 16 位 load 数"),
                predicted=float(loads_per_thread(BYTES)),
                measured=_count(general.opcodes, "LDG", "U16"),
                unit="",
            ),
            Check(
                what=Words("registers that alignment saves", "对齐节省的寄存器"),
                predicted=1.0,
                measured=float(general.registers - specialised.registers),
                unit="registers",
                kind="at_least",
            ),
        ],
        table=_table(rows),
        notes=[
            Words(
                "`cairn kernels explain rmsnorm` shows all stages of a kernel side by side.",
                "`cairn kernels explain rmsnorm` 可并排查看一个 kernel 的所有阶段。",
            )
        ],
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("stage (lines, then milliseconds)", "阶段（行数，之后是毫秒）"),
            Words("aligned", "已知对齐"),
            Words("unknown", "未知对齐"),
        ],
        rows=rows,
    )


def _compile(aligned: tuple[str, ...]) -> Any:
    from cairn.core.errors import CairnError
    from cairn.kernels.cases.linear_cross_entropy import VARIANTS
    from cairn.kernels.tooling.compile import compile_variant

    compiled = compile_variant(VARIANTS[-1]._replace(aligned=aligned), "linear_cross_entropy")
    if compiled.error is not None:
        raise CairnError(
            f"the kernel does not compile: {compiled.error}", hint="see `cairn kernels check`"
        )
    return compiled


def _count(opcodes: Mapping[str, int], name: str, width: str) -> float:
    """Instructions such as LDG.E.128."""
    parts = ((opcode.split("."), count) for opcode, count in opcodes.items())
    return float(sum(count for words, count in parts if words[0] == name and width in words))


LAB = described(__file__, run)
