"""Interface of output constraints, the part of grammars that the engine uses.

    mask() -> bits over the vocabulary -> the sampler chooses among them -> accept(token) -> mask() -> ...

A mask needs every token before it. So a constrained request is not scheduled while one of its tokens is in flight: in
the overlapped loop it takes every other step, and the requests beside it take all of them. Its mask is made after the
model's work for the step has been launched, while the device is busy with it. Who makes constraints, and of what, is
unknown here; the engine only asks.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from cairn.core.errors import RequestError

if TYPE_CHECKING:
    import numpy as np


class Constraint(Protocol):
    """The state of one request's grammar. One thread uses it at a time; it follows the tokens one by one."""

    @property
    def finished(self) -> bool:
        """The token that ends the text was accepted: nothing can follow."""
        ...

    def mask(self) -> "np.ndarray":
        """int32 words: bit v % 32 of word v // 32 is set where token v may come next. Raises nothing."""
        ...

    def accept(self, token: int) -> str | None:
        """Go on by a token. None: it did; else why it cannot, which ends the request."""
        ...

    def forced(self) -> Sequence[int]:
        """The next tokens about which the grammar leaves no choice of text, as it would spell them; often none."""
        ...

    def followed(self, tokens: Sequence[int]) -> int:
        """Number of leading tokens that the constraint accepts in sequence."""
        ...

    def copy(self) -> "Constraint":
        """Another one in the same state: it follows drafts that are not verified yet."""
        ...


def follow(constraint: Constraint | None, tokens: Iterable[int]) -> None:
    """Go on by tokens that were drawn elsewhere; RequestError where the grammar does not allow one of them."""
    if constraint is None:
        return
    for token in tokens:
        if (why := constraint.accept(token)) is not None:
            raise RequestError(
                f"the answer so far does not follow its grammar at token {token}: {why}",
                hint="a continuation has to have the same schema as its beginning",
            )
