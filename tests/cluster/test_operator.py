"""The operator against an API in memory: whatever happens in whatever order, wherever it dies, the end is the same."""

import asyncio

import msgspec
import pytest

pytest.importorskip("lightkube", reason="needs lightkube (pip install 'cairn-stack[kubernetes]')")

from hypothesis import given, settings
from hypothesis import strategies as st
from memory_api import Crash, MemoryApi
from operator_rig import (
    DEPLOYMENTS,
    EXTRAS,
    JOBS,
    KINDS,
    PLURALS,
    PODS,
    client,
    control,
    look,
    new_operator,
    put,
    remove,
    settle,
)

from cairn.cluster.operator import api as api_module
from cairn.cluster.operator.conditions import available
from cairn.cluster.operator.election import DURATION_S, LeaseView
from cairn.cluster.operator.leader import lead
from cairn.cluster.operator.objects import API, KEDA_API, Ref, covers
from cairn.cluster.operator.run import Operator
from cairn.cluster.operator.work_queue import WorkQueue
from cairn.fleet.service import INFERENCE_SERVICE

SERVICE = {"servers": [{"model": "Qwen/Qwen3-8B", "count": 2, "gpus": 1}]}
JOB = {
    "image": "cairn:cuda",
    "roles": [{"argv": ["cairn", "train", "x"], "nodes": 2, "gpus": 8}],
    "restart": {"max": 2},
}
LOOP = asyncio.new_event_loop()
STORE = MemoryApi()


@pytest.fixture
def store():
    STORE.reset()
    STORE.absent = set(EXTRAS)
    return STORE


@pytest.fixture(scope="module")
def api():
    yield LOOP.run_until_complete(_client())
    LOOP.close()


async def _client():
    return client(STORE)


def run(coroutine):
    return LOOP.run_until_complete(coroutine)


def end_state(store):
    """What users and controllers see, without numbers that count events."""
    hidden = ("uid", "resourceVersion", "generation", "ownerReferences")
    made = {}
    for key, one in store.objects.items():
        meta = {name: value for name, value in one["metadata"].items() if name not in hidden}
        status = {k: v for k, v in one.get("status", {}).items() if k != "observedGeneration"}
        if key[0].startswith(API):
            status["conditions"] = [(c["type"], c["status"]) for c in status.get("conditions", [])]
        made[key] = (meta, one.get("spec"), one.get("data"), status)
    return made


def conditions(store, ref):
    status = store.objects[PLURALS[ref.kind], "default", ref.name]["status"]
    return {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]}


def test_a_service_becomes_ready_and_then_nothing_is_written(store, api):
    ref = put(store, "InferenceService", "chat", SERVICE)
    operator = new_operator(api)
    run(settle(store, operator))
    assert set(store.named(DEPLOYMENTS)) == {"chat-router", "chat-servers-0"}
    assert conditions(store, ref)["Ready"] == ("True", "Ready")
    assert set(conditions(store, ref)) == {"Valid", "RouterReady", "Servers0Ready", "Ready"}
    writes = store.writes
    look(store, operator)
    run(operator.handle(ref))
    assert store.writes == writes


def test_a_field_that_somebody_else_changed_is_changed_back_and_one_that_is_not_ours_is_left(
    store, api
):
    put(store, "InferenceService", "chat", SERVICE)
    operator = new_operator(api)
    run(settle(store, operator))
    key = (DEPLOYMENTS, "default", "chat-servers-0")
    store.edit(key, {"spec": {"replicas": 7, "paused": False}})
    run(settle(store, operator))
    assert store.objects[key]["spec"]["replicas"] == 2
    assert store.objects[key]["spec"]["paused"] is False


def test_a_group_that_is_taken_out_of_the_spec_takes_its_objects_with_it(store, api):
    two = {"servers": [*SERVICE["servers"], {"model": "other"}]}
    put(store, "InferenceService", "chat", two)
    operator = new_operator(api)
    run(settle(store, operator))
    assert "chat-servers-1" in store.named(DEPLOYMENTS)
    put(store, "InferenceService", "chat", SERVICE)
    run(settle(store, operator))
    assert "chat-servers-1" not in store.named(DEPLOYMENTS)
    assert "chat-servers-1" not in store.named("policy/v1/poddisruptionbudgets")


def test_a_wrong_spec_is_said_in_a_condition_and_servers_that_run_stay(store, api):
    ref = put(store, "InferenceService", "chat", SERVICE)
    operator = new_operator(api)
    run(settle(store, operator))
    put(store, "InferenceService", "chat", {"servers": [{"model": "m", "urls": ["http://a:1"]}]})
    run(settle(store, operator))
    assert conditions(store, ref)["Valid"] == ("False", "Refused")
    assert conditions(store, ref)["Ready"][0] == "False"
    assert "chat-servers-0" in store.named(DEPLOYMENTS)


def test_an_object_of_that_name_that_is_not_ours_is_never_taken(store, api):
    body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat"}, "spec": {"a": 1}}
    store.write("POST", "v1/services", "default", [], {}, body, "")
    ref = put(store, "InferenceService", "chat", SERVICE)
    operator = new_operator(api)
    for _ in range(4):
        look(store, operator)
        run(operator.handle(ref))
    assert store.named("v1/services")["chat"]["spec"] == {"a": 1}
    assert conditions(store, ref)["Applied"] == ("False", "Refused")


def test_deletion_ends_clients_then_the_router_then_the_servers(store, api):
    ref = put(store, "InferenceService", "chat", SERVICE)
    operator = new_operator(api)
    run(settle(store, operator))
    remove(store, ref)
    order = []
    for _ in range(12):
        look(store, operator)
        run(operator.handle(ref))
        deployments = store.named(DEPLOYMENTS)
        order.append(
            (
                "chat" in store.named("v1/services"),
                *(
                    deployments[name]["spec"]["replicas"] if name in deployments else None
                    for name in ("chat-router", "chat-servers-0")
                ),
            )
        )
        control(store)
    seen = list(dict.fromkeys(order))
    assert seen == [(False, 1, 2), (False, 0, 2), (False, 0, 0), (False, None, None)]
    assert not store.objects


def test_a_model_is_fetched_before_its_service_starts_and_stays_while_it_is_used(store, api):
    service = put(store, "InferenceService", "chat", {"servers": [{"model": "model:qwen"}]})
    operator = new_operator(api)
    run(settle(store, operator))
    assert conditions(store, service)["ModelsReady"] == ("False", "Missing")
    assert not store.named(DEPLOYMENTS)
    model = put(store, "Model", "qwen", {"source": "Qwen/Qwen3-8B"})
    run(settle(store, operator))
    assert conditions(store, service)["Ready"][0] == "True"
    pod = store.named(DEPLOYMENTS)["chat-servers-0"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "qwen-model"
    remove(store, model)
    run(settle(store, operator))
    assert conditions(store, model)["Unused"] == ("False", "InUse")
    remove(store, service)
    run(settle(store, operator))
    assert not store.objects


def test_a_download_that_is_begun_anew_ends_the_one_before(store, api):
    """Two of them would write into one folder."""
    put(store, "Model", "qwen", {"source": "Qwen/Qwen3-8B"})
    operator = new_operator(api)
    run(settle(store, operator))
    job = store.named(JOBS)["qwen-download"]
    owner = {"kind": "Job", "name": "qwen-download", "uid": job["metadata"]["uid"]}
    owner |= {"apiVersion": "batch/v1", "controller": True}
    meta = {"name": "qwen-download-x", "namespace": "default", "ownerReferences": [owner]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta}
    store.write("POST", PODS, "default", [], {}, pod, "")
    put(store, "Model", "qwen", {"source": "Qwen/Qwen3-8B", "revision": "v2"})
    run(settle(store, operator))
    assert store.named(JOBS)["qwen-download"]["metadata"]["uid"] != owner["uid"]
    assert not store.named(PODS)


def test_replicas_are_within_least_and_most(store, api):
    group = {"model": "m", "least": 1, "most": 3}
    put(store, "InferenceService", "chat", {"servers": [group], "replicas": 9})
    operator = new_operator(api)
    run(settle(store, operator))
    assert store.named(DEPLOYMENTS)["chat-servers-0"]["spec"]["replicas"] == 3


def test_keda_has_the_number_of_servers_and_ends_before_them(store, api):
    group = {"model": "m", "least": 0, "most": 3}
    ref = put(store, "InferenceService", "chat", {"servers": [group]})
    operator = new_operator(api)
    operator.apis |= {f"{KEDA_API}/ScaledObject"}
    run(settle(store, operator))
    scaled = f"{KEDA_API}/scaledobjects"
    (one,) = store.named(scaled).values()
    assert one["spec"]["triggers"][0]["metadata"]["scalerAddress"] == "chat-scaler.default:9000"
    key = (DEPLOYMENTS, "default", "chat-servers-0")
    assert "replicas" not in store.objects[key]["spec"]
    store.edit(key, {"spec": {"replicas": 2}})  # as KEDA does it
    run(settle(store, operator))
    assert store.objects[key]["spec"]["replicas"] == 2
    remove(store, ref)
    run(settle(store, operator))
    assert not store.named(scaled)
    assert not store.named(DEPLOYMENTS)


def test_a_service_that_is_not_ready_says_where_the_reason_is():
    """Such as an image that is missing: it is in the pods alone."""
    selector = {"matchLabels": {"cairn/part": "p"}}
    live = {"metadata": {"namespace": "n"}, "spec": {"replicas": 2, "selector": selector}}
    said = available("RouterReady", live).message
    assert said == "0 of 2 replicas; see kubectl describe pods -n n -l cairn/part=p"


def end_pods(store, name_part, phase, code=0):
    for key in list(store.objects):
        if key[0] == PODS and name_part in key[2]:
            ended = {"containerStatuses": [{"state": {"terminated": {"exitCode": code}}}]}
            store.set_status(key, {"phase": phase} | (ended if phase == "Failed" else {}))


def test_a_gang_starts_again_as_a_whole_and_gives_up_after_its_restarts(store, api):
    ref = put(store, "TrainJob", "t", JOB)
    operator = new_operator(api)
    for attempt in range(3):
        run(settle(store, operator))
        pods = store.named(PODS)
        assert set(pods) == {"t-worker-0-0", "t-worker-0-1"}
        assert {one["metadata"]["labels"]["cairn.dev/attempt"] for one in pods.values()} == {
            str(attempt)
        }
        end_pods(store, "0-1", "Failed", code=1)
    run(settle(store, operator))
    assert conditions(store, ref)["Complete"] == ("False", "Failed")
    assert len(store.named(PODS)) == 2  # to be looked at


@pytest.mark.parametrize(
    ("phase", "code", "said"), [("Failed", 2, "False"), ("Succeeded", 0, "True")]
)
def test_a_mistake_is_not_tried_again_and_success_stays(store, api, phase, code, said):
    ref = put(store, "TrainJob", "t", JOB)
    operator = new_operator(api)
    run(settle(store, operator))
    end_pods(store, "0-", phase, code)
    run(settle(store, operator))
    assert conditions(store, ref)["Complete"] == (said, phase)
    for name in list(store.named(PODS)):
        store.write("DELETE", PODS, "default", [name], {}, {}, "")
    run(settle(store, operator))
    assert not store.named(PODS)
    assert conditions(store, ref)["Complete"] == (said, phase)


def test_a_queue_needs_a_kind_that_waits_in_it(store, api):
    """A job that runs as pods already goes on."""
    ref = put(store, "TrainJob", "t", JOB | {"queue": "gold"})
    operator = new_operator(api)
    run(settle(store, operator))
    assert conditions(store, ref)["Valid"] == ("False", "Refused")
    assert not store.named(PODS)
    put(store, "TrainJob", "t", JOB)
    run(settle(store, operator))
    put(store, "TrainJob", "t", JOB | {"queue": "gold"})
    run(settle(store, operator))
    assert conditions(store, ref)["Valid"] == ("True", "Accepted")
    assert len(store.named(PODS)) == 2


def test_a_train_job_goes_to_jobset_where_there_is_one(store, api):
    ref = put(store, "TrainJob", "t", JOB)
    operator = new_operator(api)
    operator.apis |= {"jobset.x-k8s.io/v1alpha2/JobSet"}
    store.absent.clear()
    run(settle(store, operator))
    jobset = ("jobset.x-k8s.io/v1alpha2/jobsets", "default", "t")
    assert jobset in store.objects
    store.set_status(jobset, {"conditions": [{"type": "Completed", "status": "True"}]})
    run(settle(store, operator))
    assert conditions(store, ref)["Complete"] == ("True", "Succeeded")
    store.write(
        "DELETE", *jobset[:2], [jobset[2]], {}, {}, ""
    )  # as its controller does a day later
    run(settle(store, operator))
    assert jobset not in store.objects
    assert conditions(store, ref)["Complete"] == ("True", "Succeeded")


EVENTS = st.lists(
    st.sampled_from(
        [
            "grow",
            "shrink",
            "two groups",
            "edit",
            "lose child",
            "pod fails",
            "pods end",
            "look",
            "stale",
            "control",
        ]
    ),
    max_size=8,
)


def happen(store, event):
    """One thing that users, controllers or nodes do."""
    if event in ("grow", "shrink", "two groups"):
        groups = [{"model": "m", "count": 3 if event == "grow" else 1}]
        put(store, "InferenceService", "chat", {"servers": groups * (1 + (event == "two groups"))})
    elif event == "edit" and (DEPLOYMENTS, "default", "chat-router") in store.objects:
        store.edit((DEPLOYMENTS, "default", "chat-router"), {"spec": {"replicas": 5}})
    elif event == "lose child":
        for key in [key for key in store.objects if not key[0].startswith(API)][:1]:
            store.write("DELETE", key[0], key[1], [key[2]], {}, {}, "")
    elif event == "pod fails":
        end_pods(store, "0-0", "Failed", code=1)
    elif event == "control":
        control(store)


async def live_through(store, operator, events, crash_in, before):
    """Events, each followed by the operator's work, which may be late to see them, and dies once."""
    refs = [Ref(API, "InferenceService", "default", "chat"), Ref(API, "TrainJob", "default", "t")]
    store.crash_in, store.crash_before = crash_in, before
    for event in events:
        crashes, store.crash_in = store.crash_in, None
        happen(store, event)
        store.crash_in = crashes
        if event != "stale":
            look(store, operator)
        for ref in refs:
            try:
                await operator.handle(ref)
            except Crash:  # a new one begins with fresh lists
                operator = new_operator(operator._api)
                look(store, operator)
    store.crash_in = None
    return operator


async def end_of(api, events=(), crash_in=None, before=False):
    STORE.reset()
    STORE.absent = set(EXTRAS)
    put(STORE, "InferenceService", "chat", SERVICE)
    put(STORE, "TrainJob", "t", JOB)
    operator = await live_through(STORE, new_operator(api), events, crash_in, before)
    put(STORE, "InferenceService", "chat", SERVICE)  # what is asked for in the end
    remove(STORE, Ref(API, "TrainJob", "default", "t"))
    put(STORE, "TrainJob", "t", JOB)
    await settle(STORE, operator)
    uids = {one["metadata"]["uid"] for key, one in STORE.objects.items() if key[0].startswith(API)}
    for key, one in STORE.objects.items():
        if not key[0].startswith(API):  # nothing is orphaned
            assert {owner["uid"] for owner in one["metadata"]["ownerReferences"]} <= uids
    return end_state(STORE)


@pytest.fixture(scope="module")
def quiet_end(api):
    return run(end_of(api))


@settings(max_examples=25)
@given(events=EVENTS, crash_in=st.none() | st.integers(0, 30), before=st.booleans())
def test_any_order_of_events_and_any_crash_end_where_a_quiet_day_ends(
    api, quiet_end, events, crash_in, before
):
    assert run(end_of(api, events, crash_in, before)) == quiet_end


async def until(there, seconds=5.0):
    for _ in range(int(seconds / 0.02)):
        if there():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come")


async def cancelled(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_running_operator_follows_watches_through_a_gap(store, api):
    async def scenario():
        operator = Operator(api, KINDS)
        task = asyncio.create_task(operator.run())
        put(store, "InferenceService", "one", SERVICE)
        await until(lambda: "one-servers-0" in store.named(DEPLOYMENTS))
        assert "policy/v1/PodDisruptionBudget" in operator.apis
        store.oldest = store.version + 1  # the watch cache has forgotten everything
        put(store, "InferenceService", "two", SERVICE)
        async with store.changed:
            store.changed.notify_all()
        await until(lambda: "two-servers-0" in store.named(DEPLOYMENTS))
        await cancelled(task)

    run(scenario())


def test_a_watch_whose_server_has_gone_without_a_word_is_begun_again(store, api, monkeypatch):
    """As after a machine that lost its power: the connection is never closed, and no event comes."""
    monkeypatch.setattr(api_module, "WATCH_S", 0)
    monkeypatch.setattr(api_module, "SILENT_S", 0.2)

    async def scenario():
        task = asyncio.create_task(Operator(api, KINDS).run())
        put(store, "InferenceService", "one", SERVICE)
        await until(lambda: "one-servers-0" in store.named(DEPLOYMENTS))
        store.network += 1
        put(store, "InferenceService", "two", SERVICE)
        async with store.changed:
            store.changed.notify_all()
        await until(lambda: "two-servers-0" in store.named(DEPLOYMENTS))
        await cancelled(task)

    run(scenario())


def test_a_cluster_without_the_kind_or_with_another_version_of_it_is_said_once(store, api):
    store.absent |= {PLURALS["TrainJob"], "policy/v1/poddisruptionbudgets"}

    async def scenario():
        said = []
        task = asyncio.create_task(Operator(api, KINDS, said.append).run())
        put(store, "InferenceService", "one", SERVICE)
        await asyncio.sleep(1.2)
        assert [text.partition(",")[0] for text in said] == [
            f"this cluster does not serve TrainJob of {API}"
        ]
        store.absent -= {PLURALS["TrainJob"], "policy/v1/poddisruptionbudgets"}  # CRDs, all at once
        await until(lambda: "one-servers-0" in store.named("policy/v1/poddisruptionbudgets"))
        await cancelled(task)

    run(scenario())


@pytest.mark.parametrize("code", [404, 429, 500, 503])
def test_an_api_server_in_trouble_is_asked_again_and_blamed_on_no_object(store, api, code):
    """404: it has just started, and does not serve CRDs yet."""
    ref = put(store, "InferenceService", "chat", SERVICE)
    operator = new_operator(api)
    run(settle(store, operator))
    control(store)
    store.set_status((DEPLOYMENTS, "default", "chat-router"), {})  # so a condition is to be written
    look(store, operator)
    before = store.writes
    store.trouble = [code]
    assert run(operator.handle(ref)) is False
    assert store.writes == before
    assert run(operator.handle(ref)) is True
    assert conditions(store, ref)["RouterReady"][0] == "False"
    assert "Applied" not in conditions(store, ref)


def test_a_fresh_list_that_tells_nothing_new_gives_nobody_work(store, api):
    put(store, "InferenceService", "chat", SERVICE)
    operator = new_operator(api)
    run(settle(store, operator))
    for kind in (*PLURALS, "Deployment"):
        group = "apps/v1" if kind == "Deployment" else API
        there = store.named(f"{group}/{kind.lower()}s").values()
        found = [{**one, "apiVersion": group, "kind": kind} for one in there]
        operator.cache.replace(group, kind, found)
        assert operator.cache.replace(group, kind, found) == []
        assert operator.cache.replace(group, kind, []) == found


def test_a_bug_with_one_object_does_not_end_the_work_for_others(store, api):
    def render(seen):
        if seen.name == "bad":
            raise ValueError("a bug")
        return INFERENCE_SERVICE.render(seen)

    async def scenario():
        said = []
        kind = msgspec.structs.replace(INFERENCE_SERVICE, render=render)
        task = asyncio.create_task(Operator(api, [kind], said.append).run())
        put(store, "InferenceService", "bad", SERVICE)
        await until(lambda: said)
        put(store, "InferenceService", "good", SERVICE)
        async with store.changed:
            store.changed.notify_all()
        await until(lambda: "good-servers-0" in store.named(DEPLOYMENTS))
        assert "InferenceService default/bad: this is a bug" in said[0]
        await cancelled(task)

    run(scenario())


def test_leaders_follow_each_other_through_outages_and_make_nothing_twice(store, api):
    """The second of two waits; the API is gone at the start and again later; the first is ended."""
    lease = Ref("coordination.k8s.io/v1", "Lease", "default", "cairn-operator")
    said = []

    def leader(me):
        return asyncio.create_task(
            lead(api, lease, me, lambda: Operator(api, KINDS), 1, said.append)
        )

    def holder():
        leases = store.named("coordination.k8s.io/v1/leases")
        return leases[lease.name]["spec"]["holderIdentity"] if leases else None

    async def scenario():
        store.down = True
        put(store, "InferenceService", "one", SERVICE)
        first = leader("a")
        await asyncio.sleep(0.3)
        store.down = False
        await until(lambda: "one-servers-0" in store.named(DEPLOYMENTS))
        second = leader("b")
        await asyncio.sleep(0.4)
        assert holder() == "a"
        store.down = True
        await asyncio.sleep(0.3)
        store.down = False
        made = {key: one["metadata"]["uid"] for key, one in store.objects.items()}
        await cancelled(first)
        await until(lambda: holder() == "b")
        put(store, "InferenceService", "two", SERVICE)
        await until(lambda: "two-servers-0" in store.named(DEPLOYMENTS))
        assert made.items() <= {k: v["metadata"]["uid"] for k, v in store.objects.items()}.items()
        await cancelled(second)

    run(scenario())
    assert said[:1] == ["a leads"]
    assert "b leads" in said


def test_a_leader_stops_when_the_api_takes_its_questions_and_never_answers(store, api):
    """Another one may lead by the time that an answer comes."""
    lease, said, ended = Ref("coordination.k8s.io/v1", "Lease", "default", "o"), [], []

    class Idle:
        async def run(self):
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(store.silent)

    async def scenario():
        task = asyncio.create_task(lead(api, lease, "a", Idle, 1, said.append))
        await until(lambda: said == ["a leads"])
        store.silent = True
        await until(lambda: bool(ended))
        store.silent = False
        await until(lambda: said[-2:] == ["a does not lead any more", "a leads"])
        await cancelled(task)

    run(scenario())
    assert ended[0] is True


def test_the_lease_goes_to_another_only_after_it_has_not_changed_for_its_duration():
    lease = {
        "metadata": {"resourceVersion": "1"},
        "spec": {"holderIdentity": "a", "leaseDurationSeconds": DURATION_S},
    }
    a, b = LeaseView(me="a"), LeaseView(me="b")
    assert (a.step(None, 0), a.step(lease, 0), b.step(lease, 0)) == ("take", "renew", "wait")
    renewed = {**lease, "metadata": {"resourceVersion": "2"}}
    assert b.step(renewed, DURATION_S - 1) == "wait"
    assert b.step(renewed, 2 * DURATION_S - 2) == "wait"
    assert b.step(renewed, 2 * DURATION_S) == "take"
    assert b.step({**renewed, "spec": {"holderIdentity": ""}}, 0) == "take"


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "take", "done", "fail"]), st.integers(0, 3)), max_size=40
    )
)
def test_the_queue_hands_out_a_key_to_one_worker_and_loses_none(steps):
    queue, working, owed, now = WorkQueue(), [], set(), 0.0
    for step, key in steps:
        now += 1.0
        if step == "add":
            queue.add(key)
            owed.add(key)
        elif step == "take" and (got := queue.take(now)) is not None:
            assert got not in working
            working.append(got)
            owed.discard(got)
        elif working:
            done = working.pop(0)
            queue.done(done, now, failed=step == "fail")
            owed |= {done} if step == "fail" else set()
    for done in working:
        queue.done(done, now)
    left = set()
    while (got := queue.take(now + 1000)) is not None:
        left.add(got)
        queue.done(got, now + 1000)
    assert left == owed
    assert queue.is_idle


def test_what_the_api_wrote_in_its_own_way_is_the_same():
    wanted = {
        "resources": {"limits": {"memory": "1024Mi", "cpu": "1"}},
        "list": [{"name": "a", "v": 1}],
    }
    live = {
        "resources": {"limits": {"memory": "1Gi", "cpu": "1000m"}},
        "list": [{"name": "x"}, {"name": "a", "v": 1, "w": 2}],
    }
    assert covers(live, wanted)
    assert covers(live, wanted | {"stringData": {"TOKEN": "x"}})  # which a Secret keeps as data
    assert not covers({**live, "list": [{"name": "a", "v": 2}]}, wanted)
    assert not covers({**live, "resources": {"limits": {"memory": "2Gi", "cpu": "1"}}}, wanted)
