"""Checks for containers and sandboxes: which one it is, and its overhead. Pure; no findings outside of one."""

from cairn.hw.evidence import HardwareEvidence
from cairn.hw.findings import HardwareFinding, ok, warn

GVISOR_KERNELS = (
    "4.4.0",
    "4.19.0-gvisor",
)  # what gVisor shows, older and newer, whatever the host runs


def check_container(evidence: HardwareEvidence) -> HardwareFinding | None:
    machine = evidence.machine
    kind, kernel = machine.container, machine.kernel or ""
    if kernel in GVISOR_KERNELS or "gvisor" in kernel:
        return warn(
            f"{kind or 'a container'} in a sandbox: kernel {kernel} is gVisor's",
            "every system call costs more, and GPUs need its nvproxy; train and serve in an ordinary runtime",
        )
    if kind is None:
        return None
    if machine.virtual:
        return ok(f"{kind} in a virtual machine (a cloud host, or Kata Containers)")
    return ok(f"{kind}, kernel {kernel or 'unknown'}")
