"""The inputs of a step in NumPy are those of the reference, padding and unknown tokens included."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.kernels.paged.step_inputs import Decided, Inputs, State, step_inputs
from cairn.kernels.sampling.draft_ngrams import DRAFTED, draft_ngrams_reference
from cairn.serve.engine.cpu_inputs import inputs_on_cpu, place_drafts

PAGE, PAGES, ROWS = 4, 12, 9
sequence = st.tuples(st.booleans(), st.integers(0, 20), st.integers(1, 9), st.integers(0, 3))


def integers(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


@given(st.lists(sequence, min_size=1, max_size=6), st.integers(0, 2**31), st.integers(1, 3))
def test_numpy_makes_what_the_reference_makes(sequences, seed, groups):
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int, high: int = 99) -> torch.Tensor:
        return torch.randint(1, high, shape, generator=generator).int()

    rows = torch.randperm(ROWS, generator=generator)[: len(sequences)].tolist()
    there = [row if real else -1 for row, (real, *_) in zip(rows, sequences, strict=True)]
    _, starts, counts, fresh = zip(*sequences, strict=True)
    total, new = sum(counts), sum(fresh)
    tokens = numbers(total)
    tokens[torch.rand(total, generator=generator) < 0.4] = -1
    tokens[torch.rand(total, generator=generator) < 0.1] = -5  # a row of the embedding arena
    bounds = integers([0, *torch.tensor(counts).cumsum(0).tolist()])
    page_bounds = integers([0, *torch.tensor(fresh).cumsum(0).tolist()])
    first = integers((start + count) // PAGE for start, count in zip(starts, counts, strict=True))
    lengths = numbers(ROWS, high=20)
    known = torch.rand(len(starts), generator=generator) < 0.7
    given = torch.where(known, integers(starts), -1).int()
    for row, start in zip(rows, starts, strict=True):
        lengths[row] = start
    decided = Decided(
        integers(there), given, bounds, first, page_bounds, numbers(groups * new), tokens
    )
    state = State(numbers(groups, ROWS, PAGES), numbers(ROWS), lengths)
    made = []
    for make in (step_inputs, inputs_on_cpu):
        mine = State(*(part.clone() for part in state))
        sizes = ((60,), (60,), (groups, 60), (60,), (groups, 8, PAGES))
        room = Inputs(*(torch.full(size, -7, dtype=torch.int32) for size in sizes))
        make(decided, mine, PAGE, room)
        made.append([*mine, *room])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 5), st.booleans())))
def test_numpy_places_drafts_as_the_reference_does(sequences):
    """Of each: a row or padding, where it begins, its tokens, and whether all but the first are a head's drafts."""
    rows = integers(at if real else -1 for at, (real, *_) in enumerate(sequences))
    counts = [count for _, _, count, _ in sequences]
    bounds = integers([0, *torch.tensor(counts, dtype=torch.int32).cumsum(0).tolist()])
    total = sum(counts)
    tokens, positions = torch.arange(20, 20 + total).int(), torch.zeros(total, dtype=torch.int32)
    for at, (_, start, count, drafted) in enumerate(sequences):
        own = slice(int(bounds[at]), int(bounds[at + 1]))
        positions[own] = start + torch.arange(count).int()
        tokens[own][1:] = DRAFTED if drafted else -5  # a row of the embedding arena
    made = torch.arange(7 * (len(sequences) + 1)).view(-1, 7).int() + 500
    found = []
    for by_numpy in (False, True):
        text, mine = torch.full((len(sequences) + 1, 24), -9).int(), tokens.clone()
        if by_numpy:
            nothing = torch.zeros(0, dtype=torch.int32)
            decided = Decided(rows, nothing, bounds, nothing, nothing, nothing, mine)
            place_drafts(decided, Inputs(mine, positions, nothing, nothing, nothing), text, made)
        else:
            draft_ngrams_reference(rows, bounds, mine, positions, text, made)
        found.append((text, mine))
    assert all(map(torch.equal, *found))
