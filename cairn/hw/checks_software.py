"""Are the packages installed, new enough, and compatible with the driver?

Pure functions over `HardwareEvidence`: nothing is imported or read here. Knows nothing about GPUs beyond
whether there is one.
"""

from cairn.hw.evidence import HardwareEvidence
from cairn.hw.findings import HardwareFinding, fail, ok, warn
from cairn.hw.versions import parse_version

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)


def check_python(evidence: HardwareEvidence) -> HardwareFinding:
    version = evidence.machine.versions.python or "unknown"
    if parse_version(version) >= OLDEST_PYTHON:
        return ok(version)
    return fail(
        f"Python {version} is older than {_dotted(OLDEST_PYTHON)}", "install a newer Python"
    )


def check_torch(evidence: HardwareEvidence) -> HardwareFinding:
    version = evidence.machine.versions.torch
    if version is None:
        return fail("torch is not installed", f"pip install 'torch>={_dotted(OLDEST_TORCH)}'")
    if evidence.torch_problem is not None:
        return fail(f"torch {version} does not import: {evidence.torch_problem}", "reinstall torch")
    if parse_version(version) < OLDEST_TORCH:
        return fail(
            f"torch {version} is older than {_dotted(OLDEST_TORCH)}",
            f"pip install 'torch>={_dotted(OLDEST_TORCH)}'",
        )
    return ok(version)


def check_cuda(evidence: HardwareEvidence) -> HardwareFinding | None:
    """A driver runs programs of its own CUDA and of older ones, never of a newer major version."""
    versions = evidence.machine.versions
    if not evidence.machine.gpus or versions.torch is None:
        return None
    if versions.torch_cuda is None and evidence.torch_gpus:
        return None  # another vendor's GPU, and torch is built for it
    if versions.torch_cuda is None:
        return fail(
            f"torch {versions.torch} was built without CUDA, and there is a GPU",
            "install the CUDA build of torch",
        )
    if versions.driver_cuda is None:
        return warn("the driver does not say which CUDA it runs", "check that libcuda is installed")
    built, runs = parse_version(versions.torch_cuda), parse_version(versions.driver_cuda)
    why = f"torch is built for CUDA {versions.torch_cuda}, the driver runs {versions.driver_cuda}"
    if built[:1] > runs[:1]:
        return fail(why, f"update the driver, or install torch for CUDA {versions.driver_cuda}")
    if built > runs:
        return warn(
            f"{why}: most things work, freshly compiled kernels may not", "update the driver"
        )
    return ok(f"{why} (driver {versions.driver or 'unknown'})")


def check_triton(evidence: HardwareEvidence) -> HardwareFinding | None:
    version = evidence.machine.versions.triton
    if evidence.triton_problem is None:
        return ok(version or "imports; its version is unknown")
    if not evidence.machine.gpus:
        return None  # the reference kernels run on a CPU
    if version is None:
        return fail("triton is not installed, and the GPU kernels need it", "pip install triton")
    return fail(f"triton {version} does not import: {evidence.triton_problem}", "reinstall triton")


def check_packages(evidence: HardwareEvidence) -> HardwareFinding:
    missing, optional = evidence.missing_packages, evidence.missing_optional
    if missing:
        return warn(f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    if optional:
        uses = ", ".join(f"{name} ({use})" for name, use in optional.items())
        return ok(f"not installed, and only needed for what is named: {uses}")
    return ok("all optional packages are installed")


def check_calibration(evidence: HardwareEvidence) -> HardwareFinding | None:
    calibration = evidence.calibration
    if calibration is None:
        return None
    if calibration.problem is not None:
        return warn(calibration.problem, "cairn calibrate")
    if calibration.stale:
        return warn(
            f"{calibration.path} is stale: {'; '.join(calibration.stale)}", "cairn calibrate"
        )
    return ok(f"measured {calibration.measured_at}")


def check_readings(evidence: HardwareEvidence) -> HardwareFinding | None:
    notes = evidence.machine.notes
    if not notes:
        return None
    return warn("; ".join(notes), "pip install nvidia-ml-py psutil")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
