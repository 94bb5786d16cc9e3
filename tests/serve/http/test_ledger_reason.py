"""Why a request was slow: every second is given to one reason, and the clear cases get the clear answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.serve.http.ledger.reason import REACH, SAYS, Phases, reason_of, shares

seconds = st.floats(0, 100, allow_nan=False, allow_subnormal=False)
floors = st.none() | seconds
phases = st.builds(
    Phases, tokenize=seconds, queue=seconds, prefill=seconds, decode=seconds, respond=seconds, requeued=seconds,
    host=seconds, device=seconds, overlapped=st.booleans(), tokens=st.integers(0, 500),
    per_token=st.none() | seconds, longest=seconds, prefill_bound=st.sampled_from(["compute", "memory"]),
    decode_bound=st.sampled_from(["compute", "memory"]), prefill_floor=floors, decode_floor=floors,
)  # fmt: skip


@given(phases)
def test_every_second_is_given_to_one_reason(given_phases):
    found = shares(given_phases)
    assert set(found) == set(SAYS)
    assert min(found.values()) >= -1e-9
    assert sum(found.values()) == pytest.approx(given_phases.total, abs=1e-6)
    reason, text = reason_of(given_phases)
    assert found[reason] == max(found.values())
    assert SAYS[reason] in text


CASES = {
    "queue": Phases(queue=2.0, prefill=0.1, decode=0.5),
    "queue, after a preemption": Phases(
        prefill=0.1, decode=3.0, requeued=2.5, tokens=50, per_token=0.06, longest=2.5
    ),
    "compute": Phases(queue=0.1, prefill=2.0, decode=0.5, device=2.5),
    "memory": Phases(prefill=0.2, decode=2.0, device=2.2, decode_floor=1.1, prefill_floor=0.1),
    "compute, also of an answer": Phases(prefill=0.2, decode=2.0, decode_bound="compute"),
    "host": Phases(tokenize=1.0, prefill=0.1, decode=0.3),
    "host, of the loop": Phases(decode=2.0, host=1.5, device=0.5),
    "host, beside a GPU that waits": Phases(decode=2.0, host=1.9, device=0.1, overlapped=True),
    "memory, of a GPU that does not wait": Phases(
        decode=2.0, host=1.2, device=0.8, overlapped=True
    ),
    "host, far above the floor": Phases(decode=2.0, device=2.0, decode_floor=0.01),
    "tail": Phases(prefill=0.1, decode=2.0, device=2.1, tokens=50, per_token=2 / 49, longest=1.6),
    "memory, of few tokens": Phases(
        prefill=0.1, decode=2.0, device=2.1, tokens=3, per_token=1.0, longest=1.9
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reason_of(case):
    assert reason_of(CASES[case])[0] == case.partition(",")[0]


def test_the_sentence_has_the_numbers():
    text = reason_of(
        Phases(queue=1.5, prefill=0.1, decode=0.4, prefill_floor=0.05, decode_floor=0.2)
    )[1]
    assert text.startswith("1.5 s of 2 s (75%) waiting for a place in the batch")
    assert text.endswith("2.0 times the floor of 250 ms")


@given(st.floats(0.01, 10), st.floats(1.0, 100.0))
def test_what_is_far_above_its_floor_is_not_the_device(floor, times):
    found = shares(Phases(decode=floor * times, decode_floor=floor))
    assert found["memory"] == pytest.approx(floor * min(times, REACH))
