"""Are the GPUs usable, healthy, fully linked and free?

Pure functions over `HardwareEvidence`. Every one but `check_gpu` and `check_matmul` says nothing where
there is no GPU, or where the driver does not tell.
"""

from cairn.core.units import format_bytes
from cairn.hw.evidence import HardwareEvidence
from cairn.hw.findings import HardwareFinding, fail, ok, warn
from cairn.hw.machine import Gpu

IDLE_GPU_BYTES = 2 << 30  # what a driver and an empty context may hold
UNSEEN = "processes that are not visible from here"


def check_gpu(evidence: HardwareEvidence) -> HardwareFinding:
    gpus, usable = evidence.machine.gpus, evidence.torch_gpus
    if not gpus:
        return warn("no GPU: everything runs on the CPU", "nothing to do, if that is what you want")
    names = ", ".join(sorted({gpu.name for gpu in gpus}))
    why = f"{len(gpus)} x {names}; torch can use {usable}"
    if usable == 0 and evidence.machine.visible_gpus in ("", "-1"):
        return warn(f"{why}: hidden by CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES")
    if usable == 0:
        return fail(why, "see the checks of torch and cuda, and CUDA_VISIBLE_DEVICES")
    if any(gpu.mig for gpu in gpus):  # before the count: a process sees one slice of all of them
        return ok(f"{why}; MIG is on, so a GPU here is a slice")
    if usable < len(gpus) and evidence.machine.visible_gpus is None:
        return warn(why, "look for the missing GPU with nvidia-smi and in the kernel log")
    return ok(why)


def check_matmul(evidence: HardwareEvidence) -> HardwareFinding | None:
    if evidence.torch_problem is not None or evidence.machine.versions.torch is None:
        return None  # the check of torch has said it
    if evidence.matmul_problem is not None:
        return fail(evidence.matmul_problem, "run it again; if it stays, do not trust this device")
    return ok(f"a small product is right on {_devices(evidence.torch_gpus)}")


def check_ecc(evidence: HardwareEvidence) -> HardwareFinding | None:
    gpus = [gpu for gpu in evidence.machine.gpus if gpu.ecc.enabled is not None]
    if not gpus:
        return None
    broken = [gpu for gpu in gpus if gpu.ecc.remap_failed]
    if broken:
        return fail(f"no spare memory rows are left on {_indices(broken)}", "replace the GPU")
    hurt = [gpu for gpu in gpus if gpu.ecc.uncorrected or gpu.ecc.remap_pending]
    if hurt:
        counts = ", ".join(f"GPU {gpu.index}: {gpu.ecc.uncorrected or 0}" for gpu in hurt)
        return warn(f"uncorrected memory errors ({counts})", "drain the host and reset the GPU")
    rows = sum(gpu.ecc.remapped_rows or 0 for gpu in gpus)
    return ok("no uncorrected memory errors" + (f"; {rows} rows were replaced" if rows else ""))


def check_pcie(evidence: HardwareEvidence) -> HardwareFinding | None:
    links = [(gpu.index, gpu.pcie.width, gpu.pcie.max_width) for gpu in evidence.machine.gpus]
    known = [(index, width, full) for index, width, full in links if width and full]
    if not known:
        return None
    narrow = [f"GPU {index}: x{width} of x{full}" for index, width, full in known if width < full]
    if narrow:
        return warn(
            f"PCIe at less than full width ({', '.join(narrow)}): copies to the host are slower",
            "reseat the card, or move it to a slot with all lanes",
        )
    return ok(", ".join(sorted({f"x{width}" for _, width, _ in known})))


def check_clocks(evidence: HardwareEvidence) -> HardwareFinding | None:
    slowed = [gpu for gpu in evidence.machine.gpus if gpu.slowdowns]
    if not evidence.machine.gpus or evidence.machine.gpus[0].source != "nvml":
        return None  # only NVML says
    if slowed:
        reasons = ", ".join(f"GPU {gpu.index}: {' + '.join(gpu.slowdowns)}" for gpu in slowed)
        return warn(f"clocks are held down ({reasons})", "check cooling and power")
    return ok("nothing holds the clocks down")


def check_gpu_memory(evidence: HardwareEvidence) -> HardwareFinding | None:
    if not evidence.machine.gpus:
        return None
    holders = [text for gpu in evidence.machine.gpus if (text := _holder(gpu, evidence.own_pid))]
    if any(UNSEEN in text for text in holders):
        return warn(
            "; ".join(holders),
            "another container shares the GPU (time-slicing, MPS), or one on the host uses it: do not measure here",
        )
    if holders:
        return warn("; ".join(holders), "stop the other processes, or choose another GPU")
    return ok("no other process holds GPU memory")


def check_p2p(evidence: HardwareEvidence) -> HardwareFinding | None:
    if evidence.torch_gpus < 2:
        return None
    pairs = evidence.pairs_without_p2p
    if pairs:
        shown = ", ".join(f"{a}-{b}" for a, b in pairs[:6]) + (" ..." if len(pairs) > 6 else "")
        return warn(
            f"no direct access between GPUs {shown}: traffic goes through host memory",
            "check NVLink and the IOMMU; disable PCIe access control (ACS) on bare metal",
        )
    return ok(f"all {evidence.torch_gpus} GPUs reach each other directly")


def check_counters(evidence: HardwareEvidence) -> HardwareFinding | None:
    restricted = evidence.machine.limits.profiling_admin_only
    if not evidence.machine.gpus or restricted is None:
        return None
    if restricted and not evidence.is_root:
        return warn(
            "only root may read the GPU's performance counters (ncu)",
            "nothing here needs it; load the module nvidia with"
            " NVreg_RestrictProfilingToAdminUsers=0 to allow it",
        )
    return ok("this user may read the GPU's performance counters")


def _holder(gpu: Gpu, own_pid: int) -> str | None:
    """Describe the other processes that use memory of this GPU, or None."""
    others = [process for process in gpu.processes if process.pid != own_pid]
    if others:
        held = ", ".join(
            f"{process.pid}"
            + (f" ({format_bytes(process.memory_bytes)})" if process.memory_bytes else "")
            for process in others
        )
        return f"GPU {gpu.index} is used by process {held}"
    if (gpu.memory_used_bytes or 0) > IDLE_GPU_BYTES:
        used = format_bytes(gpu.memory_used_bytes or 0)
        return f"GPU {gpu.index} has {used} in use by {UNSEEN}"
    return None


def _devices(gpus: int) -> str:
    return "the CPU" if gpus == 0 else "the GPU" if gpus == 1 else f"all {gpus} GPUs"


def _indices(gpus: list[Gpu]) -> str:
    return "GPU " + ", ".join(str(gpu.index) for gpu in gpus)
