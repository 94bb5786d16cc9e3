"""The supervisor's policy, whatever its nodes do: it comes to an end, counts right, and gives everything back.

The nodes are scripts of exit statuses; the engines themselves are tested for real beside this file.
"""

import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.cluster import records, supervise
from cairn.cluster.inventory import ClusterInventory
from cairn.cluster.node_reservation import LOST
from cairn.cluster.resolve import resolve
from cairn.cluster.spec import Job, Restart, Role
from cairn.cluster.supervise import Supervisor

RUNS = 777  # a node that never ends by itself


class Scripted:
    """A node that ends as its script says, or when it is told to."""

    def __init__(self, status):
        self.status, self.ended = status, False

    def poll(self):
        if self.ended:
            return -15
        return None if self.status == RUNS else self.status

    def end(self, kill=False):
        self.ended = True


class ScriptedReservation:
    address, loopback = "127.0.0.1", True

    def __init__(self, scripts, waits=0):
        self.scripts, self.waits = [list(script) for script in scripts], waits
        self.started, self.released = [], 0

    def reserve(self, plan):
        self.waits -= 1
        return None if self.waits < 0 else "waiting for nodes"

    def start(self, reserved, argv, env, log):
        script = self.scripts[reserved.index]
        handle = Scripted(script.pop(0) if script else RUNS)
        self.started.append(handle)
        return handle

    def release(self):
        self.released += 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(supervise, "POLL_S", 0)
    patch.setenv("CAIRN_JOBS", str(tmp_path_factory.mktemp("jobs")))

    def run(scripts, waits=0, policy="in_place", most=3, **parts):
        role = Role(argv=["x"], nodes=len(scripts), start="direct")
        restart = Restart(policy=policy, max=most, grace="0s")
        job = Job(name="job", roles=[role], restart=restart, **parts)
        plan = resolve(job, ClusterInventory(engine="local", checked=False))
        reservation = ScriptedReservation(scripts, waits)
        status = Supervisor(records.create(job, "local"), plan, reservation).run()
        assert reservation.released == 1
        assert all(handle.poll() is not None for handle in reservation.started)
        return status

    yield run
    patch.undo()


bad = st.sampled_from([LOST, -9, 1, 3])
scripts = st.lists(
    st.builds(lambda fails: [*fails, 0], st.lists(bad, max_size=3)), min_size=1, max_size=4
)


@settings(max_examples=40)
@given(scripts=scripts, most=st.integers(0, 6), waits=st.integers(0, 3))
def test_nodes_are_replaced_as_often_as_is_allowed(run, scripts, most, waits):
    failures = sum(len(script) - 1 for script in scripts)
    status = run(scripts, waits=waits, most=most)
    assert status.state == ("done" if failures <= most else "failed")
    assert status.restarts == min(failures, most)


@settings(max_examples=20)
@given(scripts=scripts)
def test_a_job_that_is_to_fail_does_so_at_the_first_loss(run, scripts):
    status = run(scripts, policy="fail")
    assert status.state == ("done" if all(len(script) == 1 for script in scripts) else "failed")
    assert status.restarts == 0


def test_requeue_starts_everybody_again(run):
    status = run([[0, 0, 0], [1, LOST, 0]], policy="requeue")
    assert (status.state, status.restarts) == ("done", 2)
    given_up = run([[RUNS] * 9, [1] * 9], policy="requeue", most=2)
    assert given_up.reason.startswith("node worker-1 gave up after 2 restarts")


def test_limits(run):
    assert run([[RUNS]], time_limit="10ms").reason == "time limit of 10ms reached"
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    assert run([[RUNS]], deadline=past).reason == "deadline 2020-01-01T00:00:00+00:00 reached"
    assert run([[RUNS]], waits=10**9, deadline=past).state == "failed"  # while it waits, too
