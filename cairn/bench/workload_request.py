"""Request of a workload: prompt, sampling parameters and output length."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

NOTHING: Mapping[str, float | int] = MappingProxyType({})

Draw = Callable[[int], list[int]]  # so many tokens


class WorkloadRequest(NamedTuple):
    """A request, or a further turn of a conversation: then `prompt` has only what is new in it."""

    prompt: list[int]
    output: int
    shared: int = 0  # so many tokens at its beginning are those of every other request, too
    follows: int | None = None  # place of the turn before this one; its answer comes first
    before: int = 0  # tokens of the conversation so far, that answer included
    sampling: Mapping[str, float | int] = NOTHING  # fields of `SamplingParams`

    @property
    def length(self) -> int:
        """Tokens that go in."""
        return self.before + len(self.prompt)

    @property
    def known(self) -> int:
        """Prompt tokens that were computed."""
        return max(self.shared, self.before)


def with_history(turns: list[WorkloadRequest]) -> list[WorkloadRequest]:
    """`before` of every turn, from the turns that it follows; those come earlier in the list."""
    prompts: list[WorkloadRequest] = []
    for one in turns:
        if one.follows is not None:
            last = prompts[one.follows]
            one = one._replace(before=last.length + last.output)
        prompts.append(one)
    return prompts
