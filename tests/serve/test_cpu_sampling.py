"""The quick way to sample on a CPU chooses what the reference chooses."""

from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.kernels.sampling.sampling import Parameters, sample
from cairn.serve.engine import cpu_sampling
from cairn.serve.engine.cpu_sampling import HEAD, sample_on_cpu

rows = st.tuples(
    st.sampled_from([0.0, 0.0, 1e-30, 0.3, 1.0, 5.0, 100.0]),
    st.sampled_from([0, 0, 1, 5, 39, 5000]),
    st.sampled_from([1.0, 1.0, 0.9, 0.1]),
    st.sampled_from([0.0, 0.0, 0.2]),
    st.integers(0, 2**63 - 1),
)


@given(
    st.lists(rows, min_size=1, max_size=8),
    st.integers(0, 2**31),
    st.booleans(),
    st.booleans(),
    st.sampled_from([40, 40, 2 * HEAD]),
)
def test_it_chooses_what_the_reference_chooses(wanted, seed, ties, odd, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(wanted), vocabulary, generator=generator) * 3
    logits = logits.round() if ties else logits
    if odd:
        logits[0, ::2] = torch.nan
        logits[-1] = -torch.inf
    temperature, top_k, top_p, min_p, seeds = zip(*wanted, strict=True)
    parameters = Parameters(
        torch.tensor(temperature),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.tensor(seeds),
    )
    position = torch.randint(0, 5000, (len(wanted),), generator=generator).int()
    rows = torch.randperm(len(wanted), generator=generator).int()
    rows[0] = -1 if seed % 5 == 0 else rows[0]
    expected = sample(logits, parameters, position, rows_B=rows)
    for small in (0, 10**9):  # by rows, or by the reference
        with patch.object(cpu_sampling, "SMALL", small):
            found = sample_on_cpu(logits, parameters, position, rows_B=rows)
        assert found.tolist() == expected.tolist()


def test_logits_that_are_no_numbers_are_said_once(caplog):
    cpu_sampling._warn_of_nan.cache_clear()
    parameters = Parameters(
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int32),
        torch.ones(2),
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int64),
    )
    logits, position = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int32)
    logits[0] = torch.nan
    logits[1] = -torch.inf  # nothing is allowed: a grammar's doing
    for rows in ([-1, 1], [0, 1], [0, 1]):
        sample_on_cpu(logits, parameters, position, rows_B=torch.tensor(rows).int())
        assert len(caplog.records) == (rows[0] == 0)
    cpu_sampling._warn_of_nan.cache_clear()
