"""Whether a job goes on after the end of a rank: one policy for each cause, read from what the ranks wrote."""

import pytest

from cairn.cluster.failure_reports import CALM_S, FailureReports
from cairn.core.oom_kills import oom_kills
from cairn.core.rank_failure import RankFailure, mark, summary

MEMORY = "torch.OutOfMemoryError: CUDA out of memory"
LOST = "RuntimeError: Connection reset by peer"


def log_line(folder, number, **about):
    given = dict(rank=number % 4, host="h", node="worker-0", at=100.0 + number, meeting=str(number))
    failure = RankFailure(**(given | about))
    (folder / f"{number}.json").write_text(mark(failure) + "\n")


def over(folder, reports):
    return [report.over for report in reports.new()]


@pytest.mark.parametrize(
    ("about", "answers"),
    [
        (dict(words="KeyError: 'x'"), ["not tried again"] * 3),
        (
            dict(words=MEMORY),
            [None, None, "3 times in a row, 2 are tried; give its role more memory"],
        ),
        (dict(status=-9), [None] * 3),  # killed: as often as elastic lets it
        (
            dict(status=-9, oom_kills=1),
            [None, None, "3 times in a row, 2 are tried; give its role more memory"],
        ),
        (dict(status=-9, cause="hang", why="nothing moved"), [None] * 3),
        (dict(words="Xid 79: GPU has fallen off the bus"), [None] * 3),
    ],
)
def test_each_cause_has_its_policy(tmp_path, about, answers):
    reports = FailureReports(tmp_path)
    for number, answer in enumerate(answers):
        log_line(tmp_path, number, **about)
        (said,) = over(tmp_path, reports)
        assert said == answer if said is None or answer is None else answer in said


def test_bystanders_are_not_heard_and_ranks_that_failed_together_count_once(tmp_path):
    reports = FailureReports(tmp_path)
    for number in range(4):
        log_line(tmp_path, number, words=MEMORY, meeting="7")
    log_line(tmp_path, 9, words=LOST, meeting="7")
    assert over(tmp_path, reports) == [None] * 4
    assert over(tmp_path, reports) == []  # each is told once
    log_line(tmp_path, 10, words=MEMORY, meeting="8")
    assert over(tmp_path, reports) == [None]
    log_line(tmp_path, 11, words=MEMORY, meeting="9", at=1000.0 + CALM_S)  # long after: a new story
    assert over(tmp_path, reports) == [None]


def test_a_rank_that_was_ended_on_purpose_is_told_with_the_reason():
    failure = RankFailure(
        rank=1, host="h", node="worker-1", status=-9, cause="hang", why="nothing moved", step=7
    )
    assert summary(failure) == "rank 1 on h (worker-1): hang at step 7: nothing moved"
    assert failure.verdict.cause == "hang"
    assert RankFailure(rank=1, host="h", status=-9, oom_kills=2).verdict.cause == "oom"
    assert RankFailure(rank=1, host="h", status=-11, oom_kills=2).verdict.cause == "user"


def test_the_kernel_is_asked_how_many_it_ended_for_memory(tmp_path):
    own, root = tmp_path / "cgroup", tmp_path / "root"
    (root / "memory" / "job").mkdir(parents=True)
    (root / "job").mkdir()
    own.write_text("4:cpu,memory:/job\n0::/\n")
    assert oom_kills(own, root) == 0
    (root / "memory" / "job" / "memory.oom_control").write_text(
        "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
    )
    assert oom_kills(own, root) == 3
    own.write_text("0::/job\n")
    (root / "job" / "memory.events").write_text(
        "low 0\nhigh 0\nmax 9\noom 5\noom_kill 4\noom_group_kill 0\n"
    )
    assert oom_kills(own, root) == 4
    assert oom_kills(tmp_path / "nowhere", root) == 0
