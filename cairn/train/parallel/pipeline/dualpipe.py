"""DualPipeV: forwards of one chunk paired with backwards of the other, so that their communication can overlap.

DeepSeek's DualPipe folded in half (the "cut in half" form): rank r holds stage r of the way down and stage 2p-1-r of
the way up, and in the steady state does F of one next to B of the other: on a GPU the two can run at once. One after
the other, each rank idles (p-1) * F of a stage where F = I = W, as with ZBV. Needs at least 2p microbatches. A pure
function; see `actions` for the notation.
"""

from cairn.train.parallel.pipeline.actions import Action, Counter

DOWN, UP = 0, 1


class _Steps(Counter):
    """Counts the actions, and remembers which weight gradients are deferred, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.deferred: list[tuple[int, int]] = []

    def input_gradient(self, chunk: int) -> None:
        self.deferred.append((chunk, self.count("I", chunk)))
        self.add("I", chunk)

    def weight_gradient(self) -> None:
        """Schedule the weight gradient that was deferred longest."""
        if self.deferred:
            chunk, microbatch = self.deferred.pop(0)
            self.actions.append(Action("W", chunk, microbatch))

    def backward(self, chunk: int, split: bool) -> None:
        if split:
            self.input_gradient(chunk)
        else:
            self.add("B", chunk)


def dualpipev(rank: int, ranks: int, microbatches: int) -> list[Action]:
    behind = ranks - rank - 1  # ranks further down
    steps = _Steps()
    _fill(steps, rank, behind)
    for _ in range(microbatches - 2 * ranks + rank + 1):  # the pairs that may overlap
        steps.add("F", DOWN)
        steps.add("B", UP)
        steps.add("F", UP)
        steps.add("B", DOWN)
    for _ in range(behind):  # nothing new comes down any more
        steps.add("B", UP)
        steps.add("F", UP)
        steps.add("B", DOWN)
    _drain(steps, rank, behind)
    return steps.actions


def _fill(steps: _Steps, rank: int, behind: int) -> None:
    for _ in range(2 * behind):
        steps.add("F", DOWN)
    for _ in range(rank + 1):
        steps.add("F", DOWN)
        steps.add("F", UP)
    for _ in range(behind):
        steps.input_gradient(UP)
        steps.weight_gradient()
        steps.add("F", UP)


def _drain(steps: _Steps, rank: int, behind: int) -> None:
    """Backwards of both chunks in turn; those of the second half are split, to fill what follows."""
    backwards = [chunk for _ in range(rank + 1) for chunk in (UP, DOWN)]
    whole = rank + 1  # of 2 * (rank + 1)
    for number, chunk in enumerate(backwards):
        steps.backward(chunk, split=number >= whole)
    for _ in range(behind):
        steps.weight_gradient()
        steps.input_gradient(DOWN)
    while steps.deferred:
        steps.weight_gradient()
