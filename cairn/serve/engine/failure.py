"""An exception in one line, for the request that fails with it; and whether the engine can go on after it."""

from cairn.core.errors import CairnError

ROOM = "lower gpu_memory_utilization or max_num_batched_tokens: a step found no room"
MOST_FAILED_STEPS = 8  # in a row; then the engine ends, since nothing that it computes succeeds
# A device that reports one of these fails every later call as well, until its process has ended.
FATAL_TYPES = {"AcceleratorError", "DistError"}  # of torch, which this file does not import
FATAL_TEXTS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "NCCL error")
MEMORY_TEXTS = ("out of memory", "ALLOC_FAILED")


def described(problem: BaseException) -> str:
    if isinstance(problem, CairnError):
        return str(problem)
    message = f"{type(problem).__name__}: {first_line(problem)}"
    return f"{message} (hint: {ROOM})" if is_out_of_memory(problem) else message


def first_line(problem: BaseException) -> str:
    """Errors of CUDA and NCCL are followed by lines of general advice."""
    text = str(problem).strip().splitlines()
    return text[0] if text else "no message"


def is_out_of_memory(problem: BaseException) -> bool:
    """The device had no room; what it holds and computes is not affected."""
    if type(problem).__name__ == "OutOfMemoryError":
        return True
    return _is_of_device(problem) and any(text in str(problem) for text in MEMORY_TEXTS)


def is_fatal(problem: BaseException | None) -> bool:
    """Is the device, or the connection between devices, lost for this process? Looks at the causes as well."""
    while problem is not None:
        if _is_of_device(problem) and not is_out_of_memory(problem):
            return True
        problem = problem.__cause__
    return False


def _is_of_device(problem: BaseException) -> bool:
    if any(kind.__name__ in FATAL_TYPES for kind in type(problem).__mro__):
        return True
    return isinstance(problem, RuntimeError) and any(text in str(problem) for text in FATAL_TEXTS)
