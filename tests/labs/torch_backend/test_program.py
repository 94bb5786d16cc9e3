"""Programs: every schedule, put in one line for each rank, still computes what the schedule computes."""

from collections import deque

import numpy as np
import pytest

from cairn.comm.schedule.catalogue import make, names
from cairn.comm.schedule.interpret import interpret
from cairn.comm.schedule.ops import OpKind
from cairn.comm.schedule.verify import require
from cairn.labs.torch_backend.program import lower, ordered_all_reduce, ordered_reduce_scatter

RANKS = (2, 3, 4, 5, 8)


def run_in_lines(schedule, buffers):
    """One line for each pair of ranks, without channels, and sends that never wait: as the executor has it."""
    lines = {}
    programs = [deque(lower(schedule, rank).steps) for rank in range(schedule.nodes)]
    while any(programs):
        moved = False
        for rank, steps in enumerate(programs):
            while steps:
                kind, slot, peer, source = steps[0]
                buffer = buffers[rank]
                if kind is OpKind.SEND:
                    lines.setdefault((rank, peer), deque()).append(buffer[slot].copy())
                elif kind is OpKind.COPY:
                    buffer[slot] = buffer[source]
                elif kind is OpKind.REDUCE:
                    buffer[slot] += buffer[source]
                elif not lines.get((peer, rank)):
                    break
                elif kind is OpKind.RECV:
                    buffer[slot] = lines[peer, rank].popleft()
                else:
                    buffer[slot] += lines[peer, rank].popleft()
                steps.popleft()
                moved = True
        assert moved, f"{schedule.name} hangs: {[steps[:1] for steps in map(list, programs)]}"
    assert not any(lines.values()), "a message was left over"


@pytest.mark.parametrize(("collective", "name"), [one for one in names() if one[1] != "sparse"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("parts", [1, 2])
def test_one_line_for_each_rank(collective, name, ranks, parts):
    """With parts: halves of the vector, one behind the other."""
    schedule = make(collective, name, ranks, parts=parts, channels=parts)
    count = ranks * schedule.chunks
    rng = np.random.default_rng(ranks)
    length = count // ranks if collective == "all_gather" else count
    inputs = [rng.integers(0, 100, length).astype(np.float64) for _ in range(ranks)]
    expected = interpret(schedule, inputs, capacity=4)
    buffers = []
    for rank in range(schedule.nodes):
        buffer = np.zeros((schedule.slots, count // schedule.chunks))
        if rank < ranks:
            first = rank * length if collective == "all_gather" else 0
            buffer.reshape(-1)[first : first + length] = inputs[rank]
        buffers.append(buffer)
    run_in_lines(schedule, buffers)
    for rank in range(ranks):
        flat = buffers[rank].reshape(-1)
        begin, end = 0, count
        if collective == "all_to_all":
            begin, end = count, 2 * count
        if collective == "reduce_scatter":
            begin, end = rank * count // ranks, (rank + 1) * count // ranks
        if collective == "reduce" and rank != schedule.root:
            continue
        assert np.array_equal(flat[begin:end], expected[rank])


@pytest.mark.parametrize("ranks", range(2, 9))
def test_in_the_order_of_the_ranks(ranks):
    """Proved, and ((0 + 1) + 2) + ... to the bit, wherever an element lies."""
    for schedule in (ordered_all_reduce(ranks), ordered_reduce_scatter(ranks)):
        assert require(schedule).times_bound == 1.0
    rng = np.random.default_rng(ranks)
    inputs = [rng.standard_normal(ranks * 7).astype(np.float32) for _ in range(ranks)]
    wanted = inputs[0].copy()
    for other in inputs[1:]:
        wanted += other
    for result in interpret(ordered_all_reduce(ranks), inputs):
        assert np.array_equal(result, wanted)
    for result in interpret(make("all_reduce", "one_shot", ranks), inputs):
        assert np.array_equal(result, wanted)
