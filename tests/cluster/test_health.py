"""A node is fit or it is not, with the number that says so."""

import msgspec
import pytest

from cairn.cluster.ettr import rows, scrape, why
from cairn.cluster.health import GpuHealth, HealthLimits, Vitals, examine, judge, measure
from cairn.core.cordon import Cordons
from cairn.core.job_events import Started, Stepped, Submitted, Trained
from cairn.core.job_ledger import account
from cairn.core.job_ledger_files import write_ledger

WELL = Vitals(
    node="n1",
    free_memory=0.5,
    free_disk_bytes=1 << 40,
    free_shared_bytes=1 << 34,
    load_per_core=1.0,
    write_s=0.01,
    gpus=[GpuHealth(0), GpuHealth(1)],
)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dict(free_memory=0.01), "memory: 0.01 of all free, at least 0.02"),
        (dict(free_disk_bytes=1 << 20), "disk:"),
        (dict(free_shared_bytes=0), "shared memory:"),
        (dict(load_per_core=40.0), "load 40.0 per core"),
        (dict(write_s=9.0), "takes 9.0 s to write"),
        (dict(write_s=None), "cannot be written"),
        (dict(gpus=[GpuHealth(0)]), "1 GPUs answer, 2 should"),
        (dict(gpus=[GpuHealth(0), GpuHealth(1, ecc_uncorrected=3)]), "GPU 1: 3 uncorrected"),
        (dict(gpus=[GpuHealth(0, celsius=99), GpuHealth(1)]), "GPU 0: 99 degrees"),
    ],
)
def test_what_is_wrong_is_said_and_the_node_is_left_out(change, complaint):
    limits = HealthLimits(gpus=2)
    assert judge(WELL, limits) == []
    ill = msgspec.structs.replace(WELL, **change)
    (found,) = judge(ill, limits)
    assert complaint in found
    assert examine(Cordons(), WELL, 5.0, limits) == Cordons()
    assert examine(Cordons(), ill, 5.0, limits).excluded(6.0) == {"n1": found}


def test_this_machine_is_measured(tmp_path):
    vitals = measure("here", tmp_path)
    assert vitals.write_s is not None
    assert 0 < vitals.free_memory <= 1
    assert vitals.free_disk_bytes > 0
    assert list(tmp_path.iterdir()) == []
    assert measure("here", tmp_path / "nowhere").write_s is None


def test_without_a_driver_nobody_can_say_how_many_gpus_there_are():
    blind = msgspec.structs.replace(WELL, gpus=None)
    assert judge(blind, HealthLimits(gpus=8)) == []
    assert judge(WELL, HealthLimits(gpus=8)) == ["2 GPUs answer, 8 should"]


def test_a_job_tells_where_its_time_went(tmp_path):
    assert (why(tmp_path), scrape(tmp_path)) == (None, None)
    ledger = account(
        [Submitted(at=0), Started(at=1, step=0), Trained(at=2), Stepped(at=6, step=4)], now=6
    )
    write_ledger(tmp_path, ledger)
    assert (
        why(tmp_path) == "training at step 4: 67% of 6.0 s productive; restart 1.0 s, queue 1.0 s"
    )
    assert rows(ledger)[0] == ["productive", "4.00 s", "66.7%", "steps that stayed"]
    assert 'cairn_job_time_seconds_total{cause="start",part="restart"} 1' in scrape(tmp_path)
