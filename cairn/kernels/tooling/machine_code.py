"""Analysis of machine code: ptxas' log, the disassembly, and the occupancy.

Pure functions over text: no compiler, no GPU. Instruction counts are static; how often a loop runs is not in the
code. The limits are those of sm_90.
"""

import math
import re
from collections import Counter

import msgspec

SHARED_LIMIT = 232_448  # bytes that one block can have: 227 KiB
SHARED_PER_SM = 233_472  # 228 KiB, of which each block takes 1 KiB for itself
SHARED_RESERVED = 1024
REGISTERS_PER_SM = 65_536
REGISTER_UNIT = 256  # registers are given to a warp in units of this many
WARPS_PER_SM = 64
BLOCKS_PER_SM = 32
QUARTERS = 4  # a multiprocessor is four of them; each has a quarter of the registers

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.M)
_RESOURCES = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_REGISTERS = re.compile(r"Used (\d+) registers")
_ADVISORY = re.compile(r"\((C\d{4})\)\s*([^\n]+)")
_REGISTER_OPERAND = re.compile(r"[HQIB]GMMA\S* R\d+, R\d+")
# Places in shared memory that the PTX names by a number: of a barrier, and of a store that is none of a barrier's.
_PLACE = re.compile(r"(?:add\.s32\s+(%r\d+), %r\d+, (\d+)|mov\.b32\s+(%r\d+), global_smem);")
_BARRIER = re.compile(r"mbarrier\.init\.\S+ \[(%r\d+)\]")
_STORE = re.compile(r"st\.shared\.\S+\s+\[global_smem(?:\+(\d+))?\]")
BARRIER_BYTES = 8
_THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+)")

# The first pattern that fits an opcode decides; what fits none is integer and address arithmetic.
KINDS = {
    "tensor core": r"(H|Q|I|B)GMMA|(H|I|D|Q|B)MMA",
    "TMA": r"UTMA|UBLK",
    "asynchronous copy": r"LDGSTS|LDGDEPBAR",
    "local memory": r"LDL|STL",
    "global memory": r"LDG|STG|LD\b|ST\b|REDG?\b|ATOMG?\b|CCTL",
    "shared memory": r"LDS|STS|ATOMS",
    "special function": r"MUFU",
    "float64": r"D(ADD|MUL|FMA|SETP|MNMX)",
    "float": r"F(ADD|MUL|FMA|MNMX|SETP|SEL|CHK|SET)|H(ADD2|MUL2|FMA2|MNMX2|SETP2|SET2)",
    "conversion": r"F2F|F2I|I2F|F2FP|I2FP|FRND|I2I",
    "shuffle": r"SHFL|VOTE|REDUX|MATCH|MOVM",
    "barrier": r"BAR|SYNCS|WARPSYNC|WARPGROUP|DEPBAR|MEMBAR|FENCE|ERRBAR|NANOSLEEP|USETMAXREG|ELECT|BSYNC|BSSY",
    "branch": r"BRA|BRX|JMP|EXIT|CALL|RET|BREAK|YIELD|KILL",
}
_KINDS = {kind: re.compile(pattern) for kind, pattern in KINDS.items()}


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Resources of a kernel as reported by ptxas."""

    registers: int  # per thread, when the kernel starts
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    advisories: list[str]  # "C7510 Potential Performance Loss: ..."


class Occupancy(msgspec.Struct, frozen=True, kw_only=True):
    """Occupancy of a multiprocessor by blocks of a kernel."""

    blocks: int
    warps: int
    fraction: float  # of the warps that it could hold
    limit: str  # what runs out first: "registers and shared memory"


def read_log(log: str) -> Resources:
    stack, stores, loads = _sums(_RESOURCES.findall(log))
    registers = [int(number) for number in _REGISTERS.findall(log)]
    return Resources(
        registers=max(registers, default=0),
        stack_bytes=stack,
        spill_store_bytes=stores,
        spill_load_bytes=loads,
        advisories=sorted({f"{code} {text.strip()}" for code, text in _ADVISORY.findall(log)}),
    )


def threads(ptx: str) -> int | None:
    """Per block, all of its warps: those that a warp-specialised kernel adds are in."""
    match = _THREADS.search(ptx)
    return int(match[1]) if match else None


def opcodes(sass: str) -> Counter[str]:
    """Each instruction with its modifiers, such as LDG.E.128, and how often it stands in the code."""
    return Counter(_INSTRUCTION.findall(sass))


def overwritten_barriers(ptx: str) -> list[int]:
    """Places in shared memory that hold a barrier, and are stored to as if they held something else.

    A barrier that is made and never used lives no longer than that, and the compiler gives its memory away. The unit
    that makes barriers is another one than that which stores, and may come second.
    """
    places = {one or first: int(place or 0) for one, place, first in _PLACE.findall(ptx)}
    barriers = {places[register] for register in _BARRIER.findall(ptx) if register in places}
    stored = {int(place or 0) for place in _STORE.findall(ptx)}
    return sorted(at for at in barriers if any(at <= one < at + BARRIER_BYTES for one in stored))


def has_register_operand(sass: str) -> bool:
    """Does a wgmma read its left operand from registers?"""
    return _REGISTER_OPERAND.search(sass) is not None


def mix(counts: Counter[str]) -> dict[str, int]:
    """Instructions by kind, the most frequent first. No-operations that pad the code are left out."""
    by_kind: Counter[str] = Counter()
    for opcode, count in counts.items():
        if opcode != "NOP":
            by_kind[kind(opcode)] += count
    return dict(by_kind.most_common())


def kind(opcode: str) -> str:
    return next((name for name, pattern in _KINDS.items() if pattern.match(opcode)), "integer")


def occupancy(registers: int, shared_bytes: int, warps: int) -> Occupancy:
    """Blocks per multiprocessor: the scarcest of registers, shared memory, warps and blocks decides."""
    warps = max(warps, 1)
    per_warp = math.ceil(max(registers, 1) * 32 / REGISTER_UNIT) * REGISTER_UNIT
    warps_by_registers = REGISTERS_PER_SM // QUARTERS // per_warp * QUARTERS
    room = {
        "registers": warps_by_registers // warps,
        "shared memory": SHARED_PER_SM // (shared_bytes + SHARED_RESERVED),
        "warps": WARPS_PER_SM // warps,
        "blocks": BLOCKS_PER_SM,
    }
    blocks = min(room.values())
    limit = " and ".join(name for name, count in room.items() if count == blocks)
    return Occupancy(
        blocks=blocks, warps=blocks * warps, fraction=blocks * warps / WARPS_PER_SM, limit=limit
    )


def _sums(spills: list[tuple[str, str, str]]) -> tuple[int, int, int]:
    columns = zip(*spills, strict=True) if spills else ((), (), ())
    stack, stores, loads = (sum(map(int, column)) for column in columns)
    return stack, stores, loads
