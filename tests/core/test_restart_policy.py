"""One policy for each cause: tried over every history."""

from hypothesis import given
from hypothesis import strategies as st

from cairn.core.exit_cause import CAUSES, ExitEvidence
from cairn.core.restart_policy import POLICIES, RestartHistory, decide

KILLED = ExitEvidence(status=-9)
USER = ExitEvidence(status=1, words="KeyError: 'x'")
PREEMPTED = ExitEvidence(status=143)
MEMORY = ExitEvidence(status=1, words="CUDA out of memory")
NETWORK = ExitEvidence(status=1, words="Connection reset by peer")
BROKEN = ExitEvidence(status=1, words="Xid 79: GPU has fallen off the bus")


def test_each_cause_is_answered_in_its_own_way():
    assert set(POLICIES) == set(CAUSES)
    answers = {
        e.words or e.status: decide(e, RestartHistory())[0]
        for e in (KILLED, USER, PREEMPTED, BROKEN)
    }
    assert [a.again for a in answers.values()] == ["here", "never", "queue", "elsewhere"]
    broken = decide(BROKEN, RestartHistory())[0]
    assert (broken.cordon, broken.strike) == (True, True)
    assert decide(ExitEvidence(status=0), RestartHistory())[0].again == "done"


def test_the_same_memory_error_is_not_tried_for_ever():
    history, answers = RestartHistory(limit=100), []
    for _ in range(4):
        action, history = decide(MEMORY, history)
        answers.append(action.again)
    assert answers == ["here", "here", "never", "never"]
    assert (
        "3 times in a row, 2 are tried" in decide(MEMORY, RestartHistory(2, {"oom": 2}, 9))[0].why
    )


def test_the_pause_grows_and_has_an_end():
    history, waits = RestartHistory(limit=100), []
    for _ in range(9):
        action, history = decide(NETWORK, history)
        waits.append(action.wait_s)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_preemption_does_not_count():
    history = RestartHistory(limit=0)
    for _ in range(50):
        action, history = decide(PREEMPTED, history)
        assert action.again == "queue"
    assert decide(KILLED, history)[0].again == "never"


@given(
    st.lists(st.sampled_from([KILLED, MEMORY, NETWORK, BROKEN, PREEMPTED]), max_size=30),
    st.integers(0, 5),
)
def test_a_job_ends_after_its_limit(evidence, limit):
    history, again = RestartHistory(limit=limit), 0
    for one in evidence:
        action, history = decide(one, history)
        assert action.why
        if action.again == "never":
            break
        again += action.again != "queue"
    assert again <= limit
