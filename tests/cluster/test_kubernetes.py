"""Every object that is rendered: strictly what its CRD says, and the same as the golden file that a person has read.

`CAIRN_WRITE_GOLDEN=1 pytest tests/cluster/test_kubernetes.py` writes the golden files anew.
"""

import ast
import os
import shutil
from pathlib import Path

import crd_schemas
import jsonschema
import msgspec
import pytest
import yaml

from cairn.cluster import records
from cairn.cluster.backends.interface import EngineMissing, EngineUnreachable, SubmitFailed
from cairn.cluster.backends.k8s_status import status_of
from cairn.cluster.backends.kubernetes import Kubernetes, node_of, objects, quantity
from cairn.cluster.backends.slurm import Slurm
from cairn.cluster.backends.slurm_script import script
from cairn.cluster.inventory import ClusterInventory, ClusterNode
from cairn.cluster.job_file import read_job
from cairn.cluster.resolve import CannotRun, resolve
from cairn.cluster.spec import Job, Role, Scale, Topology
from cairn.serve.http.server.metric_catalogue import CATALOGUE_HTTP

EXAMPLES = Path(__file__).parents[2] / "examples" / "jobs"
GOLDEN = Path(__file__).with_name("golden")
UNSEEN = ClusterInventory(engine="kubernetes", queues=[], needs_image=True, checked=False)
TARGETS = ("jobset", "volcano", "rayjob")


def plan_of(name_or_job):
    job = (
        name_or_job if isinstance(name_or_job, Job) else read_job(EXAMPLES / f"{name_or_job}.toml")
    )
    return resolve(job, UNSEEN)


def two_roles():
    common = {"argv": ["cairn", "train"], "image": "cairn:cuda"}
    learner = Role(name="learner", nodes=2, gpus=8, **common)
    return Job(
        name="two",
        roles=[
            learner,
            Role(name="actor", nodes=3, start="direct", gpus=2, mig="1g.10gb", **common),
        ],
        topology=Topology(required="rack"),
        priority="high",
    )


def server(nodes=1, **scale):
    """Of several nodes: somebody's program, told its place; `cairn serve` runs on one."""
    large = ["serve-large", "--rank", "{rank}", "--of", "{world}"]
    argv = ["cairn", "serve"] if nodes == 1 else large
    role = Role(name="server", argv=argv, nodes=nodes, gpus=8, image="cairn:cuda")
    return Job(name="large", kind="serve", roles=[role], scale=Scale(least=1, most=4, **scale))


def same_as_golden(name, text):
    path = GOLDEN / name
    if os.environ.get("CAIRN_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("job", ["train-tiny", "train-8b", "two"])
def test_training_objects_are_valid_and_golden(job, target):
    plan = plan_of(two_roles() if job == "two" else job)
    made = objects(plan, target)
    for each in made:
        if each["kind"] in crd_schemas.FILES:
            crd_schemas.check(each)
    if job != "two":
        same_as_golden(f"{job}-{target}.yaml", Kubernetes(target).render(plan))
    read_back = list(yaml.safe_load_all(Kubernetes(target).render(plan)))
    assert read_back == made


@pytest.mark.parametrize(("job", "enough"), [("train-8b", 2), ("train-tiny", None)])
def test_an_elastic_role_is_done_with_as_many_pods_as_it_needs(job, enough):
    """Two to four nodes: the others may never have found a place."""
    (worker,) = objects(plan_of(job), "jobset")[0]["spec"]["replicatedJobs"]
    rules = worker["template"]["spec"].get("successPolicy", {}).get("rules", [{}])
    assert rules == [{} if enough is None else {"succeededCount": enough}]


@pytest.mark.parametrize("target", TARGETS)
def test_a_typo_in_an_object_would_be_found(target):
    made = objects(plan_of("train-8b"), target)
    (main,) = [each for each in made if each["kind"] in crd_schemas.FILES]
    deep = str(main["spec"]).replace("'runAsNonRoot'", "'runAsNonroot'")
    with pytest.raises(jsonschema.ValidationError, match="runAsNonroot"):
        crd_schemas.check(main | {"spec": ast.literal_eval(deep)})
    main["spec"]["ttlSecondsAfterFinnished"] = 1
    with pytest.raises(jsonschema.ValidationError, match="ttlSecondsAfterFinnished"):
        crd_schemas.check(main)


@pytest.mark.parametrize(
    ("name", "job"),
    [("serve", None), ("serve-keda", server(actuator="keda")), ("serve-leader", server(nodes=2))],
)
def test_serving_objects(name, job):
    plan = plan_of(job or "serve")
    made = {each["kind"]: each for each in objects(plan, "jobset")}
    if "Deployment" in made:
        crd_schemas.check_pod(made["Deployment"]["spec"]["template"])
    else:
        template = made["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
        crd_schemas.check_pod(template["leaderTemplate"])
        crd_schemas.check_pod(template["workerTemplate"])
        assert made["Service"]["spec"]["selector"]["cairn/role"] == "leader"
    same_as_golden(f"{name}.yaml", Kubernetes().render(plan))


@pytest.mark.parametrize("name", ["train-tiny", "train-8b"])
def test_the_job_inside_a_rayjob_is_one_that_ray_takes(name, tmp_path):
    config, _, _ = objects(plan_of(name), "rayjob")
    path = tmp_path / "job.json"
    path.write_text(config["data"]["job.json"])
    nodes = [ClusterNode(name=f"n{i}", gpus=8, cpus=64, memory=1 << 40) for i in range(4)]
    plan = resolve(read_job(path), ClusterInventory(engine="ray", nodes=nodes, shares_nodes=True))
    assert plan.nodes == plan_of(name).nodes
    assert plan.job.checkpoint.folder


def test_kubernetes_own_objects_are_valid():
    """Deployment, Service, PodDisruptionBudget, HorizontalPodAutoscaler, ConfigMap: strictly as Kubernetes has them."""
    validate = pytest.importorskip(
        "kubernetes_validate", reason="needs kubernetes-validate: pip install kubernetes-validate"
    )
    every = [
        each for path in GOLDEN.glob("*.yaml") for each in yaml.safe_load_all(path.read_text())
    ]
    own = [made for made in every if "." not in made["apiVersion"].partition("/")[0]]
    assert {made["kind"] for made in own} == {
        "ConfigMap",
        "Deployment",
        "HorizontalPodAutoscaler",
        "PodDisruptionBudget",
        "Service",
    }
    for made in own:
        validate.validate(made, "1.35", strict=True)


def test_every_job_has_a_budget_that_counts_its_pods():
    """By number: Kubernetes computes shares only for kinds that can be scaled, and none of these can."""
    for target in TARGETS:
        (budget,) = [
            each
            for each in objects(plan_of(two_roles()), target)
            if each["kind"] == "PodDisruptionBudget"
        ]
        assert budget["spec"]["minAvailable"] == 5 + (target == "rayjob")  # Ray has a head, too
        assert budget["spec"]["selector"]["matchLabels"] == {"cairn/job": "two"}
    large = {each["kind"]: each for each in objects(plan_of(server(nodes=2)), "jobset")}
    selected = large["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    assert selected == {"cairn/job": "large"}  # the leader and its workers


def test_a_rayjob_has_the_priority_the_nearness_and_the_slices():
    job = two_roles()
    config, made, _ = objects(plan_of(job), "rayjob")
    pods = [g["template"]["spec"] for g in made["spec"]["rayClusterSpec"]["workerGroupSpecs"]]
    assert [pod["priorityClassName"] for pod in pods] == ["high", "high"]
    assert all("podAffinity" in pod["affinity"] for pod in pods)
    head = made["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert head["priorityClassName"] == "high"
    _, actors = made["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert actors["rayStartParams"] == {"num-gpus": "2"}
    assert "mig" not in config["data"]["job.json"]  # on that cluster a slice is a GPU
    queued = objects(plan_of(msgspec.structs.replace(job, queue="gold")), "rayjob")[1]
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"


def test_with_several_roles_the_first_that_is_done_does_not_end_the_others():
    def completes(name):
        policies = objects(plan_of(name), "volcano")[0]["spec"]["policies"]
        return any(policy["action"] == "CompleteJob" for policy in policies)

    assert completes("train-tiny")
    assert not completes(two_roles())


def test_a_server_is_told_its_port_and_has_the_time_to_drain():
    from cairn.serve.http.server.settings import ServerConfig

    (drain,) = [f for f in msgspec.structs.fields(ServerConfig) if f.name == "drain_timeout"]
    port = msgspec.structs.replace(server(), port=9000, queue="gold")
    deployment = objects(plan_of(port), "jobset")[0]
    pod = deployment["spec"]["template"]["spec"]
    env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert env["CAIRN_SERVE_PORT"] == "9000"
    assert pod["containers"][0]["ports"] == [{"name": "http", "containerPort": 9000}]
    assert pod["terminationGracePeriodSeconds"] > drain.default + 10
    assert deployment["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gold"


def test_names_that_are_too_long_for_a_pod_are_refused_before():
    role = Role(name="r" * 40, argv=["x"], image="cairn:cuda")
    with pytest.raises(CannotRun, match="characters, 63 are allowed"):
        objects(plan_of(Job(name="j" * 30, roles=[role])), "jobset")


def test_what_is_scaled_on_is_what_the_server_counts():
    counted = {metric.name for metric in CATALOGUE_HTTP}
    (field,) = [f for f in msgspec.structs.fields(Scale) if f.name == "metric"]
    assert set(field.type.__args__) <= counted


def test_gpus_slices_and_nearness():
    made = {
        each["name"]: each
        for each in objects(plan_of(two_roles()), "jobset")[0]["spec"]["replicatedJobs"]
    }
    pods = {name: each["template"]["spec"]["template"]["spec"] for name, each in made.items()}
    assert pods["learner"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert pods["actor"]["containers"][0]["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == "2"
    (term,) = pods["learner"]["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["topologyKey"] == "cloud.provider.com/topology-rack"
    volcano = objects(plan_of(two_roles()), "volcano")[0]["spec"]
    assert volcano["networkTopology"] == {"mode": "hard", "highestTierAllowed": 1}
    assert volcano["minAvailable"] == 5


def test_without_an_image_nothing_runs_there():
    with pytest.raises(CannotRun, match="names no image"):
        plan_of(Job(name="bare", roles=[Role(argv=["cairn", "train"])]))


def test_an_engine_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineMissing, match="kubectl is not installed"):
        Kubernetes().look()
    with pytest.raises(EngineMissing, match="Slurm is not installed"):
        Slurm().look()


def test_a_cluster_that_does_not_answer(tmp_path, monkeypatch):
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "none",
        "clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}],
        "contexts": [{"name": "none", "context": {"cluster": "none", "user": ""}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(EngineUnreachable, match="refused"):
        Kubernetes().look()


def test_nodes_as_kubectl_prints_them():
    found = node_of(
        {
            "metadata": {"name": "a", "labels": {"cloud.provider.com/topology-rack": "r1"}},
            "status": {
                "allocatable": {
                    "cpu": "95500m",
                    "memory": "1024Gi",
                    "nvidia.com/gpu": "8",
                    "nvidia.com/mig-1g.10gb": "7",
                }
            },
        }
    )
    assert (found.cpus, found.memory, found.gpus) == (95.5, 1 << 40, 8)
    assert (found.mig, found.domains) == ({"1g.10gb": 7}, {"rack": "r1"})
    assert quantity("500m") == 0.5


JOBSET = {"kind": "JobSet", "spec": {}, "status": {}}


@pytest.mark.parametrize(
    ("made", "pods", "workloads", "state", "reason"),
    [
        (
            JOBSET | {"status": {"conditions": [{"type": "Completed", "status": "True"}]}},
            [],
            [],
            "done",
            "all pods finished",
        ),
        (
            JOBSET | {"status": {"conditions": [{"type": "Suspended", "status": "True"}]}},
            [],
            [
                {
                    "status": {
                        "conditions": [
                            {
                                "type": "QuotaReserved",
                                "status": "False",
                                "message": "insufficient quota for nvidia.com/gpu",
                            }
                        ]
                    }
                }
            ],
            "queued",
            "waits in its queue: insufficient quota for nvidia.com/gpu",
        ),
        (
            JOBSET,
            [
                {
                    "status": {
                        "phase": "Pending",
                        "containerStatuses": [
                            {
                                "image": "cairn:nope",
                                "state": {"waiting": {"reason": "ImagePullBackOff"}},
                            }
                        ],
                    }
                }
            ],
            [],
            "starting",
            "the image cairn:nope cannot be pulled",
        ),
        (
            JOBSET,
            [
                {
                    "status": {
                        "phase": "Pending",
                        "conditions": [
                            {
                                "type": "PodScheduled",
                                "status": "False",
                                "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu",
                            }
                        ],
                    }
                }
            ],
            [],
            "starting",
            "cannot be placed: 0/4 nodes are available: 4 Insufficient nvidia.com/gpu",
        ),
        (
            {"kind": "Job", "status": {"state": {"phase": "Inqueue"}}},
            [],
            [],
            "queued",
            "Volcano says inqueue",
        ),
        (
            {
                "kind": "RayJob",
                "status": {"jobDeploymentStatus": "Failed", "message": "entrypoint failed"},
            },
            [],
            [],
            "failed",
            "entrypoint failed",
        ),
        (
            {"kind": "Deployment", "spec": {"replicas": 2}, "status": {"readyReplicas": 1}},
            [],
            [],
            "running",
            "1 of 2 copies answer",
        ),
    ],
)
def test_every_job_that_does_not_run_says_why(made, pods, workloads, state, reason):
    status = status_of(made, pods, workloads)
    assert (status.state, status.reason) == (state, reason)


@pytest.mark.parametrize("name", ["train-tiny", "train-8b"])
def test_the_script_for_slurm_is_golden(name):
    job = read_job(EXAMPLES / f"{name}.toml")
    plan = resolve(job, Slurm().unseen())
    same_as_golden(f"{name}.sbatch", script(plan, "LOGS", []))


def fake_kubectl(folder, monkeypatch, **answers):
    """A kubectl that prints `answers[verb]` on stderr and fails, or an empty list."""
    program = folder / "kubectl"
    cases = "".join(f"{verb}) echo '{said}' >&2; exit 1;;\n" for verb, said in answers.items())
    empty = '{"kind": "List", "items": []}'
    program.write_text(f"#!/bin/sh\ncase $1 in\n{cases}*) echo '{empty}';;\nesac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_an_empty_cluster_is_not_taken_for_one_that_forbids(tmp_path, monkeypatch, capsys):
    fake_kubectl(tmp_path, monkeypatch)
    assert not Kubernetes().look().checked
    assert "the cluster has no nodes" in capsys.readouterr().err
    fake_kubectl(tmp_path, monkeypatch, get="Error from server (Forbidden): nodes is forbidden")
    with pytest.raises(EngineUnreachable):  # queues may not be listed, either
        Kubernetes().look()


def test_a_kind_that_the_cluster_lacks_is_named(tmp_path, monkeypatch):
    said = 'error: resource mapping not found: no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"'
    fake_kubectl(tmp_path, monkeypatch, create=said)
    monkeypatch.setenv("CAIRN_JOBS", str(tmp_path / "jobs"))
    plan = plan_of("train-tiny")
    record = records.create(plan.job, "kubernetes")
    with pytest.raises(SubmitFailed, match="no JobSet") as refused:
        Kubernetes().submit(plan, record)
    assert "TrainJob" in refused.value.hint
