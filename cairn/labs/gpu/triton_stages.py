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

from cairn.labs.lab import Check, Lab, Outcome, Question, Rows, Table, Words
from cairn.labs.workbench import Workbench

BLOCK, THREADS, BYTES, WIDEST = 2048, 128, 2, 16


def loads_per_thread(width_bytes: int) -> int:
    """Instructions that a thread needs for its share of the block."""
    return BLOCK // THREADS * BYTES // width_bytes


def run(bench: Workbench) -> Outcome:
    bench.step("compiling, told what is aligned")
    told = _compile(("values", "count"))
    bench.step("compiling, told nothing")
    untold = _compile(())
    rows = [
        [stage, len(told.stages[stage].splitlines()), len(untold.stages[stage].splitlines())]
        for stage in told.stages
    ]
    rows += [
        [f"ms: {stage}", ms, untold.stage_ms.get(stage, 0.0)] for stage, ms in told.stage_ms.items()
    ]
    return Outcome(
        checks=[
            Check(
                what=Words("stages from Python to SASS", "从 Python 到 SASS 的阶段数"),
                predicted=6.0,
                measured=float(len(told.stages)),
                unit="",
            ),
            Check(
                what=Words("128-bit loads when alignment is known", "已知对齐时的 128 位 load 数"),
                predicted=float(loads_per_thread(WIDEST)),
                measured=_count(told.opcodes, "LDG", "128"),
                unit="",
            ),
            Check(
                what=Words("16-bit loads when it is not", "未知对齐时的 16 位 load 数"),
                predicted=float(loads_per_thread(BYTES)),
                measured=_count(untold.opcodes, "LDG", "U16"),
                unit="",
            ),
            Check(
                what=Words("registers that alignment saves", "对齐节省的寄存器"),
                predicted=1.0,
                measured=float(untold.registers - told.registers),
                unit="registers",
                kind="at_least",
            ),
        ],
        table=_table(rows),
        notes=[
            Words(
                "`cairn kernels explain rmsnorm` shows all stages of a kernel side by side.",
                "`cairn kernels explain rmsnorm` 可并排查看一个内核的所有阶段。",
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


LAB = Lab(
    name="triton-stages",
    area="gpu",
    title=Words("Triton, stage by stage", "逐阶段看 Triton 编译"),
    hypothesis=Words(
        "What the compiler knows decides the machine code: with pointer and count known as multiples of 16 "
        "each thread loads its 16 numbers in 2 instructions of 128 bits, otherwise in 16 of 16 bits.",
        "编译器知道什么决定了机器码：已知指针和长度是 16 的倍数时，每线程用 2 条 128 位 load 取 16 个数；"
        "否则要 16 条 16 位 load。",
    ),
    run=run,
    causes=(
        Words(
            "another version of Triton or ptxas than the pinned one",
            "Triton 或 ptxas 版本与锁定的不同",
        ),
        Words(
            "the kernel of linear_cross_entropy was changed", "linear_cross_entropy 的内核被改过"
        ),
    ),
    code=(
        "cairn/kernels/tooling/compile.py:compile_variant",
        "cairn/kernels/tooling/explain.py:summary",
        "cairn/kernels/tooling/machine_code.py:opcodes",
        "cairn/kernels/loss/linear_cross_entropy.py:VARIANTS",
    ),
    reading=(
        "Triton: An Intermediate Language and Compiler for Tiled Neural Network Computations (2019)",
        "MLIR: A Compiler Infrastructure for the End of Moore's Law (2020)",
    ),
    questions=(
        Question(
            Words("What does TTGIR know that TTIR does not?", "TTGIR 比 TTIR 多知道什么？"),
            Words(
                "Layouts: which thread of which warp owns which element of a tensor, where data sits in "
                "shared memory, and how loads are pipelined. TTIR only has tensors and operations on them.",
                "布局：张量的每个元素由哪个 warp 的哪个线程持有、数据在 shared memory 的位置、load 如何流水。"
                "TTIR 只有张量和运算。",
            ),
        ),
        Question(
            Words(
                "Why does an argument of 16 compile another kernel than one of 17?",
                "参数为 16 和 17 时为什么会编译出两个内核？",
            ),
            Words(
                "Triton specialises integers on divisibility by 16 (and on 1): that fact enables wide loads. "
                "Each combination is a cache entry, so a varying argument can compile twice; "
                "do_not_specialize avoids it.",
                "Triton 会按“能否被 16 整除”（以及是否为 1）特化整数参数，从而启用宽 load；"
                "每种组合是一个缓存项，do_not_specialize 可避免重复编译。",
            ),
        ),
        Question(
            Words(
                "PTX looks fine but the kernel is slow. Why look at SASS?",
                "PTX 看着没问题但内核很慢，为什么还要看 SASS？",
            ),
            Words(
                "ptxas allocates registers, schedules and may spill or serialise wgmma; only SASS and its "
                "log show spills, instruction widths and what really became of a loop.",
                "ptxas 才做寄存器分配和调度，可能溢出或让 wgmma 串行；只有 SASS 和它的日志能看到 spill、"
                "指令宽度和循环的真实样子。",
            ),
        ),
    ),
    needs=("triton",),
    seconds=4.0,
)
