"""Lint of compiled kernels: problems that make one slow, wrong or impossible to launch on sm_90.

Pure functions over the facts of `compile`: each rule looks at one `Compiled` and answers with a sentence or None.
A `fail` must not ship; an `info` is worth knowing.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from cairn.kernels.tooling.compiled import Compiled
from cairn.kernels.tooling.machine_code import SHARED_LIMIT

Severity = Literal["fail", "info"]
Rule = Callable[[Compiled], str | None]


class Finding(msgspec.Struct, frozen=True):
    severity: Severity
    rule: str
    message: str


def compiles(kernel: Compiled) -> str | None:
    return f"does not compile: {kernel.error}" if kernel.error else None


def spills(kernel: Compiled) -> str | None:
    if max(kernel.spill_store_bytes, kernel.spill_load_bytes) <= kernel.allowed_spills:
        return None
    return (
        f"spills {kernel.spill_store_bytes} bytes to memory and reads {kernel.spill_load_bytes} back, "
        f"with {kernel.registers} registers in {kernel.warps} warps"
    )


def serialised(kernel: Compiled) -> str | None:
    """ptxas gives up on asynchronous wgmma with a remark between C7508 and C7520."""
    advisories = [text for text in kernel.advisories if _is_about_wgmma(text)]
    return f"tensor cores wait for each other: {'; '.join(advisories)}" if advisories else None


def shared_memory(kernel: Compiled) -> str | None:
    if kernel.shared_bytes <= SHARED_LIMIT:
        return None
    return (
        f"needs {kernel.shared_bytes} bytes of shared memory, and a block can have {SHARED_LIMIT}"
    )


def tensor_cores(kernel: Compiled) -> str | None:
    """Check that the expected tensor-core instructions are used; wgmma satisfies an expected mma."""
    if kernel.error or kernel.expect == "none":
        return None
    wgmma = any("GMMA" in opcode for opcode in kernel.opcodes)
    mma = wgmma or "tensor core" in kernel.mix
    if wgmma if kernel.expect == "wgmma" else mma:
        return None
    instructions = "only mma.sync" if mma else "no tensor-core instruction at all"
    return f"expects {kernel.expect}, and the machine code has {instructions}"


def barriers(kernel: Compiled) -> str | None:
    """A warp that waits for such a barrier, or reads what was stored there, may never come back."""
    if not kernel.overwritten_barriers:
        return None
    places = ", ".join(str(place) for place in kernel.overwritten_barriers)
    return (
        f"stores into the barrier at byte {places} of shared memory: is one made that nobody uses?"
    )


def dot_on_ordinary_cores(kernel: Compiled) -> str | None:
    if not kernel.multiplies or "tensor core" in kernel.mix or kernel.expect != "none":
        return None
    return "a tl.dot runs on ordinary cores; right for float32 in full precision, slow otherwise"


def register_operand(kernel: Compiled) -> str | None:
    """Older ptxas may overwrite such registers too early: triton issue 9433, PR 11781."""
    if not kernel.register_operand:
        return None
    return "a wgmma takes its left operand from registers: check it for exactness on integers"


def float64(kernel: Compiled) -> str | None:
    count = kernel.mix.get("float64", 0)
    return (
        f"{count} instructions compute in float64; was a constant left untyped?" if count else None
    )


def local_memory(kernel: Compiled) -> str | None:
    if not kernel.stack_bytes or kernel.spill_store_bytes:
        return None
    return f"keeps {kernel.stack_bytes} bytes per thread in local memory"


RULES: Mapping[Severity, tuple[Rule, ...]] = {
    "fail": (compiles, spills, serialised, shared_memory, barriers, tensor_cores),
    "info": (dot_on_ordinary_cores, register_operand, float64, local_memory),
}


def lint(kernel: Compiled) -> list[Finding]:
    """Everything there is to say, failures first."""
    findings = []
    for severity, rules in RULES.items():
        for rule in rules:
            message = rule(kernel)
            if message is not None:
                findings.append(Finding(severity, rule.__name__, message))
    return findings


def failed(findings: list[Finding]) -> bool:
    return any(finding.severity == "fail" for finding in findings)


def _is_about_wgmma(advisory: str) -> bool:
    code = advisory.partition(" ")[0].removeprefix("C")
    return code.isdigit() and 7508 <= int(code) <= 7520
