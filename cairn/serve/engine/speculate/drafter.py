"""Interface of drafters, which propose the next tokens of requests. Pure Python.

    propose --> drafts d1 d2 d3 --one step--> drawn s0 s1 s2 s3 --accepted--> s0 .. as far as d1 == s0, d2 == s1, ...

The sampler draws the largest of score + noise, and noise is a function of seed, position and token: a draw depends on
what is before it and on nothing else. So a draft that equals the draw before it is followed by the draw that would have
been made without drafts. Whatever a drafter proposes, the answer is the same; only the number of steps differs. That
holds for every kind of sampling, penalties and grammars included, and for temperature 0.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cairn.serve.engine.speculate.acceptance import ANY, Kind

if TYPE_CHECKING:
    from cairn.serve.engine.request import Request


class Ask(NamedTuple):
    """A request whose next tokens are wanted."""

    request: "Request"
    hoped: Sequence[int]  # what is guessed of the tokens in flight; the drafts follow them
    most: int  # drafts


class Drafts(list[int]):
    """Proposed tokens, and what they rest on; a plain sequence rests on anything."""

    __slots__ = ("kind",)

    def __init__(self, tokens: Iterable[int], kind: Kind) -> None:
        super().__init__(tokens)
        self.kind = kind


def kind_of(proposed: Sequence[int]) -> Kind:
    return proposed.kind if isinstance(proposed, Drafts) else ANY


def kinds_of(drafter: "Drafter | None") -> tuple[Kind, ...]:
    """Draft types that a drafter proposes for requests without a grammar."""
    return () if drafter is None else getattr(drafter, "kinds", (ANY,))


class Drafter(Protocol):
    """Guesses on the host. Deterministic: the ranks of a tensor-parallel group ask their own, and have to agree.

    One that proposes `Drafts` names their kinds in `kinds`.
    """

    def propose(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        """Propose up to `most` tokens for each request, to follow its prompt, outputs and `hoped`.

        It is asked for one more than a step verifies: for the token that is drawn behind the last draft. Fewer, or
        none, is an answer, too.
        """
        ...

    def finish(self, request: "Request") -> None:
        """The request has ended: nothing more is asked about it."""
        ...


def accepted(drawn: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The run of draws that holds: `drawn` has one more than `drafts`, and the first of them always holds."""
    for at, draft in enumerate(drafts):
        if drawn[at] != draft:
            return list(drawn[: at + 1])
    return list(drawn)
