"""Real ranks with real faults: what torch itself wrote down is enough to name them.

Every fault, the namespaces and twenty healthy runs: `cairn comm doctor --selftest`.
"""

import json

import forked
import pytest
import torch
import torch.distributed as dist

from cairn.cli.comm.comm import run
from cairn.comm.doctor import namespaces
from cairn.comm.doctor.diagnose import diagnose
from cairn.comm.doctor.ranks import NO_ANSWER, flight_recording, run_ranks
from cairn.comm.doctor.selftest import cases, run_case, run_healthy
from cairn.core.errors import CairnError

QUICK = ("straggler", "missing rank", "dead rank", "mismatched sizes", "mismatched operations")


@pytest.mark.parametrize("name", QUICK)
def test_a_real_fault_is_named(name):
    verdict = run_case(next(case for case in cases() if case.name == name))
    assert verdict.right, (verdict.named, verdict.evidence)


def test_healthy_ranks_give_no_finding():
    verdict = run_healthy(0)
    assert verdict.named == []


@pytest.mark.skipif(namespaces.reason() is not None, reason=str(namespaces.reason()))
def test_a_slow_host_is_found_over_a_real_network():
    verdict = run_case(next(case for case in cases() if case.name == "slow host"))
    assert "slow host: rank 2 on host2" in verdict.named, (verdict.named, verdict.evidence)
    # All hosts share one machine: where it lets a rank wait for 200 ms, that looks like a packet sent again.
    others = {one.partition(":")[0] for one in verdict.named}
    assert others <= {"slow host", "lossy link"}, (verdict.named, verdict.evidence)


def in_groups(rank, world, hang):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    for _ in range(6):
        dist.all_reduce(torch.ones(5))
        dist.all_reduce(
            torch.ones(5 + rank // 2), group=mine
        )  # other sizes in other groups are right
    dist.broadcast(torch.ones(3), 1)
    dist.gather(torch.ones(2), [torch.ones(2) for _ in range(world)] if rank == 0 else None)
    waiting = (
        dist.all_reduce(torch.ones(9), group=mine, async_op=True) if hang and rank == 3 else None
    )
    dist.barrier()
    dump = flight_recording()
    dist.barrier()  # all have written it while rank 3 waits
    if hang and rank == 2:
        dist.all_reduce(torch.ones(9), group=mine)
    if waiting is not None:
        waiting.wait()
    return dump


@pytest.mark.parametrize("hang", [False, True])
def test_groups_within_the_job_are_told_apart(hang, tmp_path):
    for rank, dump in enumerate(forked.run_ranks(4, in_groups, hang)):
        (tmp_path / f"trace_{rank}").write_bytes(dump)
    found = diagnose([tmp_path]).findings
    assert [(one.cause, one.where) for one in found] == ([("hang", "rank 2")] if hang else [])


def test_a_rank_that_dies_gives_no_answer_and_the_others_do():
    def work(rank, world):
        if rank == 1:
            raise SystemExit(3)
        return rank

    assert run_ranks(3, work) == [0, NO_ANSWER, 2]


def test_the_verb_tests_itself(capsys):
    assert run(["doctor", "--selftest", "--only", "in Inspector", "--healthy", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["faults"], found["named_rightly"]) == (True, 3, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "takes files"),
        (["--probe", "--selftest"], "takes files"),
        (["--probe", "--ranks", "1"], "probe of 1 ranks"),
        (["--probe", "--bytes", "0"], "0 bytes"),
        (["--selftest", "--only", "gremlins"], "no case"),
        (["x.log", "--sizes", "1Mib"], "unit"),
    ],
)
def test_questions_that_make_no_sense_are_refused(words, message):
    with pytest.raises(CairnError, match=message):
        run(["doctor", *words])
