"""The classic orders: GPipe, 1F1B and interleaved 1F1B. Pure functions; see `actions` for the notation.

4 ranks, 4 microbatches, backward twice as long as forward:

    gpipe   rank 0   F0 F1 F2 F3 .................. B0 B0 B1 B1 B2 B2 B3 B3      stash: every microbatch
    1f1b    rank 0   F0 F1 F2 F3 .............. B0 B0 .. B1 B1 .. B2 B2 .. B3    stash: at most the ranks behind

Both idle (p-1) / (m+p-1) of the time; 1F1B keeps fewer activations. With v chunks on each rank the pipeline fills
in smaller steps, and the idle share is (p-1) / (v*m+p-1) (arXiv:2104.04473).
"""

from cairn.train.parallel.pipeline.actions import Action, Counter


def gpipe(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """All forwards, then all backwards (arXiv:1811.06965)."""
    forwards = [Action("F", 0, m) for m in range(microbatches)]
    return forwards + [Action("B", 0, m) for m in range(microbatches)]


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """1F1B: forwards and backwards alternate as soon as the first backward can run (arXiv:1806.03377)."""
    warmup = min(ranks - rank - 1, microbatches)
    fill = [Action("F", 0, m) for m in range(warmup)]
    steady = [
        action
        for m in range(microbatches - warmup)
        for action in (Action("F", 0, warmup + m), Action("B", 0, m))
    ]
    drain = [Action("B", 0, m) for m in range(microbatches - warmup, microbatches)]
    return fill + steady + drain


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """1F1B over several chunks on each rank: rounds of `ranks` microbatches go through chunk after chunk."""
    total = microbatches * chunks
    warmup = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, total)
    steps = Counter()
    for step in range(total + warmup):
        if step < total:
            steps.add("F", step // ranks % chunks)
        if step >= warmup:
            steps.add("B", chunks - 1 - (step - warmup) // ranks % chunks)
    return steps.actions
