"""Which tokens the next step computes."""

from dataclasses import dataclass


@dataclass
class Request:
    name: str
    prompt: int  # tokens to read
    wanted: int  # tokens to make
    computed: int = 0  # tokens of the prompt that were read
    made: int = 0


def step(
    waiting: list[Request], running: list[Request], budget: int, max_running: int
) -> list[tuple[str, int]]:
    """Plans a step and carries it out: (name, tokens) of who computes how much; both lists are changed.

    A decode computes 1 token and makes 1. A chunk that reads the last token of a prompt makes 1 as well.
    """
    # begin answer
    plan, budget_left = [], budget
    decoding = [one for one in running if one.computed == one.prompt]
    for request in decoding:
        if budget_left > 0:
            plan.append((request.name, 1))
            request.made += 1
            budget_left -= 1
    for request in [one for one in running if one.computed < one.prompt]:
        budget_left -= _prefill(request, budget_left, plan)
    while waiting and budget_left > 0 and len(running) < max_running:
        running.append(waiting.pop(0))
        budget_left -= _prefill(running[-1], budget_left, plan)
    running[:] = [one for one in running if one.made < one.wanted]
    return plan
    # end answer


def _prefill(request: Request, budget_left: int, plan: list[tuple[str, int]]) -> int:
    """Reads as much of a prompt as the budget allows; returns how much that was."""
    # begin answer
    chunk = min(request.prompt - request.computed, budget_left)
    if chunk > 0:
        plan.append((request.name, chunk))
        request.computed += chunk
        request.made += request.computed == request.prompt
    return chunk
    # end answer
