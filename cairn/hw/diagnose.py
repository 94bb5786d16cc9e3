"""Is this machine fit to run, and what should change?

Runs every check of the table over the evidence and keeps what they say. The checks are small
functions over data, in the four files beside this one; all the reading and trying is in
`evidence`.

    evidence.collect() ──> Evidence ──diagnose──> [Verdict] ──overall──> ok | warn | fail
"""

from collections.abc import Mapping

from cairn.hw import checks_container, checks_gpu, checks_host, checks_software
from cairn.hw.evidence import HardwareEvidence
from cairn.hw.findings import Check, HardwareFinding, HardwareVerdict, Status, fail

CHECKS: dict[str, Check] = {
    "python": checks_software.check_python,
    "torch": checks_software.check_torch,
    "cuda": checks_software.check_cuda,
    "gpu": checks_gpu.check_gpu,
    "matmul": checks_gpu.check_matmul,
    "triton": checks_software.check_triton,
    "ecc": checks_gpu.check_ecc,
    "pcie": checks_gpu.check_pcie,
    "clocks": checks_gpu.check_clocks,
    "gpu memory": checks_gpu.check_gpu_memory,
    "p2p": checks_gpu.check_p2p,
    "counters": checks_gpu.check_counters,
    "container": checks_container.check_container,
    "cpu": checks_host.check_cpu,
    "numa": checks_host.check_numa,
    "memory": checks_host.check_memory,
    "shm": checks_host.check_shm,
    "open files": checks_host.check_open_files,
    "locked memory": checks_host.check_locked_memory,
    "transfer": checks_host.check_transfer,
    "model cache": checks_host.check_hub_cache,
    "cairn cache": checks_host.check_cairn_cache,
    "calibration": checks_software.check_calibration,
    "packages": checks_software.check_packages,
    "readings": checks_software.check_readings,
}


def diagnose(
    evidence: HardwareEvidence, checks: Mapping[str, Check] | None = None
) -> list[HardwareVerdict]:
    """Every verdict that applies, in the order of `CHECKS`."""
    findings = (
        (name, _careful(check, evidence))
        for name, check in (CHECKS if checks is None else checks).items()
    )
    return [
        HardwareVerdict(name=name, status=finding.status, why=finding.why, fix=finding.fix)
        for name, finding in findings
        if finding is not None
    ]


def overall(verdicts: list[HardwareVerdict]) -> Status:
    statuses = {verdict.status for verdict in verdicts}
    return "fail" if "fail" in statuses else "warn" if "warn" in statuses else "ok"


def _careful(check: Check, evidence: HardwareEvidence) -> HardwareFinding | None:
    try:
        return check(evidence)
    except Exception as error:  # noqa: BLE001  a doctor that dies of one symptom is of no use
        return fail(f"the check itself failed: {type(error).__name__}: {error}", "report this bug")
