"""A job file: written and read back the same, and refused with the line, the value and the name that was meant."""

import datetime
import string
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.cluster.job_file import job_from, job_json, job_toml, read_job
from cairn.cluster.spec import (
    FILLED,
    Array,
    Checkpoint,
    Elastic,
    Health,
    Job,
    Restart,
    Role,
    Scale,
    Topology,
)
from cairn.core.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "jobs").glob("*.toml"))

names = st.from_regex(r"[a-z]([-a-z0-9]{0,12}[a-z0-9])?", fullmatch=True)
words = st.text(string.printable.replace("{", ""), min_size=1, max_size=12)
variables = st.dictionaries(
    st.from_regex(r"[A-Z_][A-Z0-9_]{0,6}", fullmatch=True), words, max_size=2
)
durations = st.sampled_from(["1s", "90s", "2m", "1h 30m", "3d"])
counts = st.integers(1, 64)


@st.composite
def roles(draw):
    least = draw(counts)
    return Role(
        name=draw(names),
        argv=draw(st.lists(words, min_size=1, max_size=4)),
        env=draw(variables),
        nodes=draw(st.sampled_from([least, (least, least + draw(counts))])),
        gpus=draw(st.integers(0, 8)),
        mig=draw(st.sampled_from(["", "1g.10gb"])),
        cpus=draw(st.sampled_from([0.5, 1.0, 8.0])),
        memory=draw(st.sampled_from(["1GiB", "512MiB"])),
        start=draw(st.sampled_from(["elastic", "direct"])),
        image=draw(st.none() | st.just("cairn:cuda")),
        ranks=draw(st.integers(0, 8)),
    )


@st.composite
def jobs(draw):
    return Job(
        name=draw(names),
        kind=draw(st.sampled_from(["train", "serve"])),
        env=draw(variables),
        roles=draw(st.lists(roles(), min_size=1, max_size=3, unique_by=lambda role: role.name)),
        queue=draw(st.none() | names),
        priority=draw(st.none() | names),
        gang=draw(st.booleans()),
        topology=Topology(required=draw(st.sampled_from([None, "rack", "host"]))),
        time_limit=draw(durations),
        deadline=draw(
            st.none() | st.just(datetime.datetime(2027, 1, 2, 3, 4, 5, tzinfo=datetime.UTC))
        ),
        after=draw(st.lists(names, max_size=2)),
        array=Array(count=draw(counts)),
        elastic=Elastic(regrow=draw(st.booleans())),
        restart=Restart(policy=draw(st.sampled_from(["in_place", "fail"]))),
        checkpoint=Checkpoint(
            folder=draw(st.none() | words),
            tiers=draw(st.sampled_from([("disk",), ("memory", "disk")])),
        ),
        health=Health(heartbeat=draw(durations)),
        scale=Scale(least=1, most=draw(counts)),
    )


@given(jobs())
def test_toml_and_json_give_the_same_job_back(tmp_path_factory, job):
    folder = tmp_path_factory.mktemp("job")
    for name, text in (("job.toml", job_toml(job)), ("job.json", job_json(job))):
        path = folder / name
        path.write_text(text, encoding="utf-8")
        assert read_job(path) == job


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_jobs(path):
    job = read_job(path)
    assert job_from(_values(job_json(job)), "json") == job


def _values(text):
    import json

    return json.loads(text)


ROLE = '\n[[roles]]\nargv = ["true"]\n'


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            'name = "a"\nprioritty = "high"' + ROLE,
            "unknown field 'prioritty' (JOB line 2)",
            "did you mean 'priority'?",
        ),
        (
            'name = "a"' + ROLE + "gpu = 8",
            "unknown field 'roles[0].gpu' (JOB line 4)",
            "did you mean 'gpus'?",
        ),
        (
            'name = "a"' + ROLE + '[restart]\npolicyy = "fail"',
            "unknown field 'restart.policyy' (JOB line 5)",
            "did you mean 'policy'?",
        ),
        (
            'name = "a"\nregrow = true' + ROLE,
            "unknown field 'regrow' (JOB line 2)",
            "'regrow' belongs to 'elastic'",
        ),
        (
            'name = "a"' + ROLE + 'queue = "x"',
            "unknown field 'roles[0].queue' (JOB line 4)",
            "'queue' belongs to the job itself",
        ),
        (
            'name = "a"' + ROLE + 'gpus = "8"',
            "roles[0].gpus: expected `int`, got `str` (JOB line 4)",
            "docs/cluster.md",
        ),
        (
            'name = "a"\n[restart]\npolicy = "retry"' + ROLE,
            "invalid enum value 'retry'",
            "docs/cluster.md",
        ),
        ("version = 1" + ROLE, "missing required field `name`", "docs/cluster.md"),
        (
            'version = 9\nname = "a"' + ROLE,
            "is of version 9; this is version 1",
            "a newer Cairn wrote it",
        ),
        ('name = "My Job"' + ROLE, "'My Job' cannot be the name of a job", "such as 'my-job'"),
        ('name = "a"\nroles = []', "job 'a' has no roles", "[[roles]]"),
        ('name = "a"' + ROLE + ROLE, "has two roles 'worker'", "a name of its own"),
        ('name = "a"\n[[roles]]\nname = "w"', "role 'w' has no argv", "argv ="),
        (
            'name = "a"' + ROLE + "nodes = [4, 2]",
            "has more at least than at most",
            "nodes = [2, 4]",
        ),
        ('name = "a"' + ROLE + "nodes = 0", "nodes is 0", "nodes = 1"),
        (
            'name = "a"' + ROLE + 'memory = "8G"',
            "memory of role 'worker': unknown unit 'G'",
            "8GiB",
        ),
        ('name = "a"' + ROLE + 'mig = "huge"', "is no MIG profile", "1g.10gb"),
        (
            'name = "a"\ntime_limit = "soon"' + ROLE,
            "time_limit: cannot read the duration 'soon'",
            "90s",
        ),
        (
            'name = "a"\ndeadline = 2027-01-01T00:00:00' + ROLE,
            "has no time zone",
            "2027-01-01T00:00:00Z",
        ),
        (
            'name = "a"\n[[roles]]\nargv = ["x", "{wolrd}"]',
            "nothing is known to put for {wolrd}",
            "did you mean 'world'?",
        ),
        (
            'name = "a"\nenv = { A = "{wolrd}" }' + ROLE,
            "job 'a': nothing is known to put for {wolrd}",
            "did you mean 'world'?",
        ),
        ('name = "a"\n[roles]\nargv = ["x"]', "roles: expected `array`", "[[roles]]"),
        (
            'name = "a"' + ROLE + '[restart]\npolicy = "shrink"',
            "every role has a fixed number of nodes",
            "nodes = [1, 1]",
        ),
        (
            'name = "a"' + ROLE + 'env = { "A-B" = "x" }',
            "env 'A-B' is no name of a variable",
            "letters",
        ),
        (
            'name = "a"\n[checkpoint]\ntiers = ["object"]' + ROLE,
            "there is no checkpoint.object_store",
            "s3://bucket/run",
        ),
        (
            'name = "a"\n[scale]\nleast = 3\nmost = 2' + ROLE,
            "scale.least 3 is more than scale.most 2",
            "scale.most = 3",
        ),
        ("name = ", "line 1", "text is written in quotes"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message, hint):
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_job(path)
    assert message.replace("JOB", str(path)) in caught.value.message
    assert hint in (caught.value.hint or "")


def test_braces_in_a_program_are_its_own():
    Role(argv=["python", "-c", "pid = 7\nprint(f'{pid}')"])
    with pytest.raises(ConfigError, match=r"\{pid\}"):
        Role(argv=["x", "--pid={pid}"])


@pytest.mark.parametrize("text", ["[1]", "{", "nothing"])
def test_json_that_is_none(tmp_path, text):
    path = tmp_path / "job.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_job(path)


def test_everything_that_is_filled_in_is_known_to_the_rank():
    from cairn.cluster.rank import place

    assert set(place({})) == set(FILLED)


def test_what_a_job_says_about_failures_is_what_the_trainer_is_told(monkeypatch):
    """The variables are settings of `cairn train`; only a trainer that is to keep copies in memory gets them."""
    from cairn.cli.train.train import read
    from cairn.cluster.elastic import recovery_env
    from cairn.cluster.inventory import ClusterInventory
    from cairn.cluster.resolve import resolve

    job = read_job(next(path for path in EXAMPLES if path.stem == "train-survives"))
    (group,) = resolve(job, ClusterInventory(engine="local", checked=False)).groups
    for name, value in recovery_env(job, group).items():
        monkeypatch.setenv(name, value)
    recovery = read(group.argv[2:]).recovery
    assert recovery.on
    assert (recovery.silent_s, recovery.stuck_s, recovery.restarts) == (3.0, 60.0, 3)
    on_disk = msgspec.structs.replace(job.checkpoint, tiers=("disk",))
    assert recovery_env(msgspec.structs.replace(job, checkpoint=on_disk), group) == {}
    assert recovery_env(job, msgspec.structs.replace(group, argv=["python", "x"])) == {}
