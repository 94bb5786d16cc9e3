"""Numbers out of ptxas' log and the disassembly, and what the lint makes of them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.kernels.tooling import machine_code
from cairn.kernels.tooling.compiled import Compiled
from cairn.kernels.tooling.lint import failed, lint
from cairn.kernels.tooling.machine_code import SHARED_LIMIT, WARPS_PER_SM, occupancy

LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x
ptxas info    : Compiling entry function 'k' for 'sm_90a'
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 16 bytes cumulative stack size
"""

SASS = """
	.section	.text.k,"ax",@progbits
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @UP1 UTMALDG.2D [UR8], [UR4] ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R88, gdesc[UR8].tnspB, R88 ;
        /*0040*/                   MUFU.EX2 R3, R3 ;
        /*0050*/                   FFMA R3, R3, R3, R3 ;
        /*0060*/                   NOP ;
        /*0070*/                   STL [R1], R3 ;
        /*0080*/                   EXIT ;
"""


def test_the_log():
    found = machine_code.read_log(LOG)
    assert found.registers == 168
    assert (found.stack_bytes, found.spill_store_bytes, found.spill_load_bytes) == (16, 12, 20)
    assert [text[:5] for text in found.advisories] == ["C7510"]


def test_an_empty_log_is_all_zero():
    found = machine_code.read_log("")
    assert (found.registers, found.stack_bytes, found.advisories) == (0, 0, [])


def test_the_instruction_mix():
    counts = machine_code.opcodes(SASS)
    assert counts["LDG.E.128"] == 1
    assert counts["HGMMA.64x128x16.F32.BF16"] == 1
    assert machine_code.mix(counts) == {
        "integer": 1,
        "global memory": 1,
        "TMA": 1,
        "tensor core": 1,
        "special function": 1,
        "float": 1,
        "local memory": 1,
        "branch": 1,
    }
    assert not machine_code.has_register_operand(SASS)
    assert machine_code.has_register_operand(
        "QGMMA.64x128x32.F32.E4M3.E4M3 R24, R4, gdesc[UR4], R24 ;"
    )


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("LDS.128", "shared memory"),
        ("LDSM.16.M88.4", "shared memory"),
        ("LDGSTS.E.BYPASS.128", "asynchronous copy"),
        ("STG.E.128", "global memory"),
        ("LD.E", "global memory"),
        ("REDG.E.ADD.F32", "global memory"),
        ("RED.E.ADD", "global memory"),
        ("HMMA.16816.F32.BF16", "tensor core"),
        ("DFMA", "float64"),
        ("DEPBAR.LE", "barrier"),
        ("F2FP.BF16.F32.PACK_AB", "conversion"),
        ("FADD.FTZ", "float"),
        ("HFMA2.BF16_V2", "float"),
        ("REDUX.SUM", "shuffle"),
        ("IMAD.WIDE", "integer"),
        ("BRA.U", "branch"),
    ],
)
def test_kinds(opcode, kind):
    assert machine_code.kind(opcode) == kind


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "blocks", "limit"),
    [
        (32, 0, 4, 16, "registers and warps"),  # 2048 threads, the most there can be
        (32, 0, 1, 32, "blocks"),
        (255, 0, 8, 1, "registers"),
        (128, 0, 4, 4, "registers"),
        (64, 100_000, 4, 2, "shared memory"),
        (168, 200_000, 12, 1, "registers and shared memory"),
    ],
)
def test_occupancy_of_known_kernels(registers, shared, warps, blocks, limit):
    found = occupancy(registers, shared, warps)
    assert (found.blocks, found.limit) == (blocks, limit)
    assert found.warps == blocks * warps


@given(
    registers=st.integers(1, 255),
    shared=st.integers(0, SHARED_LIMIT),
    warps=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_occupancy_stays_within_the_chip(registers, shared, warps):
    found = occupancy(registers, shared, warps)
    assert 0 <= found.fraction <= 1
    assert found.warps <= WARPS_PER_SM
    assert found.warps * 32 * registers <= machine_code.REGISTERS_PER_SM
    assert found.blocks * shared <= machine_code.SHARED_PER_SM
    assert (
        occupancy(registers, shared, warps).blocks
        <= occupancy(max(1, registers // 2), shared, warps).blocks
    )


def kernel(**facts) -> Compiled:
    return Compiled(kernel="k", variant="v", **facts)


CLEAN = {"registers": 32, "warps": 4, "mix": {"float": 3}, "opcodes": {"FADD": 3}}


@pytest.mark.parametrize(
    ("facts", "severity", "rule"),
    [
        ({"error": "X: no"}, "fail", "compiles"),
        ({"spill_store_bytes": 8, "spill_load_bytes": 8}, "fail", "spills"),
        ({"advisories": ["C7515 serialised"]}, "fail", "serialised"),
        ({"shared_bytes": SHARED_LIMIT + 1}, "fail", "shared_memory"),
        ({"expect": "wgmma"}, "fail", "tensor_cores"),
        ({"expect": "mma"}, "fail", "tensor_cores"),
        (
            {"expect": "wgmma", "opcodes": {"HMMA.1": 1}, "mix": {"tensor core": 1}},
            "fail",
            "tensor_cores",
        ),
        ({"multiplies": True}, "info", "dot_on_ordinary_cores"),
        ({"register_operand": True}, "info", "register_operand"),
        ({"mix": {"float64": 2}}, "info", "float64"),
        ({"stack_bytes": 64}, "info", "local_memory"),
    ],
)
def test_each_rule_fires_alone(facts, severity, rule):
    found = lint(kernel(**{**CLEAN, **facts}))
    assert [(finding.severity, finding.rule) for finding in found] == [(severity, rule)]
    assert failed(found) == (severity == "fail")


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"shared_bytes": SHARED_LIMIT},
        {"advisories": ["C1234 something else"]},
        {"expect": "mma", "opcodes": {"HGMMA.64x8": 1}, "mix": {"tensor core": 1}},
        {"expect": "wgmma", "opcodes": {"QGMMA.64x8": 1}, "mix": {"tensor core": 1}},
        {"expect": "mma", "opcodes": {"HMMA.16816": 1}, "mix": {"tensor core": 1}},
    ],
)
def test_a_clean_kernel_has_no_findings(facts):
    assert lint(kernel(**{**CLEAN, **facts})) == []


def test_counts_add_up():
    counts = Counter({"FADD": 3, "FMUL": 2, "NOP": 9})
    assert sum(machine_code.mix(counts).values()) == 5
