"""Zero-bubble orders: the backward in two parts, and the part that no stage waits for fills the gaps
(arXiv:2401.10241).

Inputs' gradients (I) go up the pipeline at once; weights' gradients (W) are computed where a rank would idle.

    1f1b    idle per rank  (p-1) * (F + I + W)
    zb-h1   idle per rank  (p-1) * (F + I - W)      the same activations in flight as 1F1B
    zbv     idle per rank  (p-1) * F of a stage     two chunks in a V; where F = I = W and m >= 2p - 1, nothing but
                                                    the first microbatch's way down

Pure functions; see `actions` for the notation.
"""

from cairn.train.parallel.pipeline.actions import Action, Counter


def zb_h1(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """1F1B whose rank r postpones r weight gradients, and spends them in the gaps of the way out."""
    warmup = min(ranks - rank, microbatches)
    steps = Counter()
    for _ in range(warmup):
        steps.add("F")
    while steps.count("I") < microbatches:
        steps.add("I")
        draining = steps.count("F") == microbatches
        if draining or steps.count("I") - steps.count("W") > rank:
            steps.add("W")
        if not draining:
            steps.add("F")
    while steps.count("W") < microbatches:
        steps.add("W")
    return steps.actions


def zbv(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Down in chunk 0, up in chunk 1, so that the rank that starts a microbatch also computes its loss."""
    steps = Counter()
    planned = max(
        microbatches, 2 * ranks - 1
    )  # the phases below need so many; the surplus is dropped
    _fill(steps, rank, ranks)
    while steps.count("F", 1) < planned:  # each forward is answered by a backward of the same chunk
        if steps.count("F", 0) < planned:
            steps.add("F", 0)
        _backward(steps, 0)
        steps.add("F", 1)
        _backward(steps, 1)
    _drain(steps, rank, ranks)
    return [action for action in steps.actions if action.microbatch < microbatches]


def _fill(steps: Counter, rank: int, ranks: int) -> None:
    for _ in range(2 * (ranks - rank) - 1):  # until the first microbatch is back from the turn
        steps.add("F", 0)
    for _ in range(rank):
        steps.add("F", 1)
        steps.add("F", 0)
    for _ in range(ranks - rank):
        steps.add("F", 1)
        _backward(steps, 1)


def _drain(steps: Counter, rank: int, ranks: int) -> None:
    """The last inputs' gradients first, because others wait for them; weights' gradients in the gaps."""
    for _ in range(rank):
        steps.add("I", 0)
        steps.add("I", 1)
    for _ in range(ranks - rank):
        steps.add("I", 0)
        steps.add("W", 0)
    for chunk in (1, 0):
        while steps.count("W", chunk) < steps.count("I", chunk):
            steps.add("W", chunk)


def _backward(steps: Counter, chunk: int) -> None:
    steps.add("I", chunk)
    steps.add("W", chunk)
