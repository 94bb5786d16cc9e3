"""Whether a job fits: what is planned does, whatever the cluster; what does not is refused with numbers."""

import datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.cluster.inventory import ClusterInventory, ClusterNode
from cairn.cluster.resolve import CannotRun, resolve
from cairn.cluster.spec import Checkpoint, Health, Job, Restart, Role, Scale, Topology

GIB = 1 << 30


def nodes(count, gpus=8, rack=4):
    return [
        ClusterNode(
            name=f"n{i}", gpus=gpus, cpus=64, memory=512 * GIB, domains={"rack": f"r{i // rack}"}
        )
        for i in range(count)
    ]


def job(count=2, gpus=8, **parts):
    role = Role(argv=["true"], nodes=count, gpus=gpus, cpus=8, memory="64GiB")
    return Job(name="job", roles=[role], **parts)


small = st.integers(0, 4)


@given(
    have=st.lists(st.tuples(small, st.integers(1, 4)), max_size=6),
    want=st.lists(st.tuples(st.integers(1, 3), small, st.integers(1, 4)), min_size=1, max_size=3),
    shares=st.booleans(),
)
def test_what_is_planned_fits_and_what_is_refused_does_not(have, want, shares):
    cluster = ClusterInventory(
        engine="ray",
        shares_nodes=shares,
        nodes=[
            ClusterNode(name=f"n{i}", gpus=gpus, cpus=cpus) for i, (gpus, cpus) in enumerate(have)
        ],
    )
    roles = [
        Role(name=f"r{i}", argv=["x"], nodes=n, gpus=gpus, cpus=cpus)
        for i, (n, gpus, cpus) in enumerate(want)
    ]
    asked = Job(name="job", roles=roles)
    total = [sum(n * amount for n, *amounts in want for amount in [amounts[k]]) for k in (0, 1)]
    there = [sum(node[k] for node in have) for k in (0, 1)]
    try:
        plan = resolve(asked, cluster)
    except CannotRun:
        assert len(want) > 1 or not _fits_alone(want[0], have, shares)
        return
    assert [group.most for group in plan.groups] == [n for n, _, _ in want]
    assert all(asks <= has for asks, has in zip(total, there, strict=True))


@given(cores=st.integers(1, 16), tenths=st.integers(1, 10))
def test_shares_of_a_cpu_fill_a_machine_to_the_last_one(cores, tenths):
    machine = ClusterNode(name="m", cpus=cores, memory=64 * GIB)
    count = 10 * cores // tenths
    role = Role(argv=["x"], nodes=count, cpus=tenths / 10, memory="1MiB")
    plan = resolve(
        Job(name="job", roles=[role]),
        ClusterInventory(engine="local", nodes=[machine], shares_nodes=True),
    )
    assert plan.nodes == count


def _fits_alone(want, have, shares):
    """One role, counted by hand."""
    count, gpus, cpus = want
    each = [
        min(node_gpus // gpus if gpus else 99, node_cpus // cpus) for node_gpus, node_cpus in have
    ]
    return sum(places if shares else min(1, places) for places in each) >= count


def test_refusals_have_the_numbers():
    cluster = ClusterInventory(engine="slurm", nodes=nodes(3), queues=["main", "debug"])
    with pytest.raises(CannotRun, match=r"needs 4 nodes of 8 GPUs, 8 CPUs and 64 GiB.*so 3 fit"):
        resolve(job(4), cluster)
    with pytest.raises(
        CannotRun, match=r"needs 1 nodes of 16 GPUs.*the largest of 3 nodes has 8 GPUs"
    ):
        resolve(job(1, gpus=16), cluster)
    with pytest.raises(CannotRun, match="no queue 'mein'") as caught:
        resolve(job(queue="mein"), cluster)
    assert caught.value.hint == "did you mean 'main'?"
    with pytest.raises(CannotRun, match="slurm has no nodes"):
        resolve(job(), msgspec.structs.replace(cluster, nodes=[]))


def test_nearness_that_is_required():
    cluster = ClusterInventory(engine="slurm", nodes=nodes(8), queues=[])
    near = Topology(required="rack")
    assert resolve(job(4, topology=near), cluster).nodes == 4
    with pytest.raises(CannotRun, match=r"requires 5 nodes in one rack; the largest, r1, has 4"):
        resolve(job(5, topology=near), cluster)
    bare = [msgspec.structs.replace(node, domains={}) for node in nodes(8)]
    with pytest.raises(CannotRun, match="no node of slurm says where it is"):
        resolve(job(4, topology=near), msgspec.structs.replace(cluster, nodes=bare))
    assert resolve(job(5, topology=Topology(preferred="rack")), cluster).nodes == 5


def test_a_domain_is_chosen_in_which_the_job_fits():
    """The rack with the most nodes need not be the one with the GPUs."""
    poor = [msgspec.structs.replace(node, gpus=1) for node in nodes(4)]
    rich = [ClusterNode(name=f"x{i}", gpus=8, cpus=64, domains={"rack": "rich"}) for i in range(2)]
    for shares in (False, True):
        cluster = ClusterInventory(
            engine="kubernetes", nodes=[*poor, *rich], queues=[], shares_nodes=shares
        )
        near = job(2, topology=Topology(required="rack"), image="x")
        assert resolve(near, cluster).nodes == 2
        with pytest.raises(CannotRun, match="in one rack"):
            resolve(msgspec.structs.replace(near, roles=job(3).roles), cluster)
        with pytest.raises(CannotRun, match="the only node in one host has 8 GPUs"):
            resolve(msgspec.structs.replace(near, topology=Topology(required="host")), cluster)


def test_several_pods_may_lie_on_one_node_of_kubernetes():
    one = ClusterInventory(engine="kubernetes", nodes=nodes(1), queues=[], shares_nodes=True)
    assert resolve(job(2, gpus=4, image="x"), one).nodes == 2
    near = job(2, gpus=4, image="x", topology=Topology(required="rack"))
    assert resolve(near, one).job.topology == Topology()  # one machine is near enough
    with pytest.raises(CannotRun, match=r"the only node has 8 GPUs.*for all of them, so 1 fit"):
        resolve(job(2, image="x"), one)


LATE = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def test_a_deadline_that_has_passed_is_refused_and_one_to_come_limits_the_run():
    asked = job(deadline=LATE, image="x", time_limit="2h")
    for engine in ("local", "ray", "slurm", "kubernetes"):
        cluster = ClusterInventory(engine=engine, nodes=nodes(2), queues=[])
        with pytest.raises(CannotRun, match=r"deadline of job 'job', 2026-01-01.* has passed"):
            resolve(asked, cluster, LATE)
        hour = resolve(asked, cluster, LATE - datetime.timedelta(hours=1))
        assert hour.job.seconds == (3600 if engine == "kubernetes" else 7200)
        assert resolve(asked, cluster, LATE - datetime.timedelta(days=1)).job.seconds == 7200
        assert resolve(asked, cluster).job == asked  # nobody said what time it is


@pytest.mark.parametrize(
    ("engine", "parts", "says"),
    [
        ("ray", {"priority": "high"}, "priority 'high' is not used: ray has no queue"),
        ("local", {"gang": False}, "gang = false makes no difference"),
        ("slurm", {"topology": Topology(required="rack")}, "max_switch_wait"),
        ("ray", {"topology": Topology(preferred="rack")}, "but not prefer it"),
        ("local", {"kind": "serve", "scale": Scale(most=3)}, "on local there is one copy"),
        ("local", {"image": "x"}, "image 'x' is not used"),
        (
            "slurm",
            {"health": Health(hang="1m")},
            "is not `cairn train`: it does not read health.hang",
        ),
    ],
)
def test_what_an_engine_makes_no_use_of_is_said_once(engine, parts, says):
    plan = resolve(job(2, **parts), ClusterInventory(engine=engine, nodes=nodes(2), queues=[]))
    assert len([note for note in plan.notes if says in note]) == 1


def test_what_only_copies_in_memory_bring_is_said_where_there_are_none():
    role = Role(argv=["cairn", "train", "tiny-cpu"])
    cluster = ClusterInventory(engine="local", nodes=nodes(1), shares_nodes=True)

    def notes(tiers, **parts):
        kept = Checkpoint(tiers=tiers, interval="auto")
        return resolve(Job(name="job", roles=[role], checkpoint=kept, **parts), cluster).notes

    assert notes(("memory", "disk")) == []
    assert notes(("disk",)) == [
        'checkpoint.interval: not used, without "memory" in checkpoint.tiers'
    ]
    (said,) = notes(("memory", "disk"), restart=Restart(policy="fail"))
    assert said.endswith("restart.policy is fail")


@pytest.mark.parametrize(
    ("engine", "parts", "role", "says"),
    [
        ("ray", {}, {"mig": "1g.10gb"}, "ray counts GPUs only"),
        ("slurm", {"topology": Topology(required="block")}, {}, "one rack (a leaf switch)"),
        ("slurm", {"topology": Topology(required="host")}, {}, "a node of slurm is a host"),
        (
            "kubernetes",
            {"kind": "serve"},
            {"argv": ["cairn", "serve"]},
            "`cairn serve` runs on one",
        ),
    ],
)
def test_what_no_cluster_of_that_kind_can_do_is_refused_in_a_dry_run_too(engine, parts, role, says):
    asked = job(2, image="x", **parts)
    asked = msgspec.structs.replace(asked, roles=[msgspec.structs.replace(asked.roles[0], **role)])
    with pytest.raises(CannotRun) as caught:
        resolve(asked, ClusterInventory(engine=engine, checked=False))
    assert says in caught.value.message
    assert caught.value.hint


def test_an_elastic_job_takes_what_there_is():
    plan = resolve(job((2, 6)), ClusterInventory(engine="ray", nodes=nodes(3), shares_nodes=True))
    assert plan.groups[0].most == 3
    assert "gets 3 of 6 nodes" in plan.notes[0]


def test_slices_are_counted_apart_from_gpus():
    sliced = ClusterNode(name="n", gpus=0, cpus=64, mig={"1g.10gb": 7})
    role = Role(argv=["x"], gpus=7, mig="1g.10gb")
    cluster = ClusterInventory(engine="kubernetes", nodes=[sliced])
    assert resolve(Job(name="j", roles=[role]), cluster).groups[0].gpus == 7
    with pytest.raises(CannotRun, match=r"8 1g\.10gb slices"):
        resolve(Job(name="j", roles=[msgspec.structs.replace(role, gpus=8)]), cluster)


@pytest.mark.parametrize("engine", ["local", "ray", "kubernetes"])
def test_what_an_engine_cannot_do_is_said(engine):
    from cairn.cluster.spec import Array

    cluster = ClusterInventory(engine=engine, nodes=nodes(4), queues=[])
    with pytest.raises(CannotRun, match="has no job arrays"):
        resolve(job(array=Array(count=4)), cluster)
    if engine == "kubernetes":
        with pytest.raises(CannotRun, match="waits for other jobs"):
            resolve(job(after=["first"]), cluster)
