"""An exception in one line, for the request that fails with it."""

from cairn.core.errors import CairnError

ROOM = "lower gpu_memory_utilization or max_num_batched_tokens: a step found no room"


def described(problem: BaseException) -> str:
    if isinstance(problem, CairnError):
        return str(problem)
    text = str(problem).strip().splitlines()
    name = type(problem).__name__
    message = f"{name}: {text[0] if text else 'no message'}"
    return f"{message} (hint: {ROOM})" if name == "OutOfMemoryError" else message
