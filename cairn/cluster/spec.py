"""Job specification: one versioned value that every engine understands.

    version = 1                                [[roles]]                     a job has one role or more
    name = "train-tiny"                        name = "worker"
    time_limit = "2h"                          nodes = [2, 4]                at least 2, at best 4
    [restart]                                  gpus = 8                      of each node
    policy = "shrink"                          argv = ["cairn", "train", "tiny-cpu", "--dp", "{world}"]

Knows no engine and no machine: whether a job fits somewhere is decided by `resolve`. In argv and env `{world}`,
`{rank}`, `{node}`, `{nodes}`, `{attempt}`, `{job}` and `{folder}` are filled in when the rank starts.
"""

import datetime
import re
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from cairn.core.errors import ConfigError
from cairn.core.units import parse_bytes, parse_duration

VERSION = 1
NAME = re.compile(
    r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"
)  # what Kubernetes takes, with room for suffixes
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MIG = re.compile(r"[1-9]g\.[0-9]{1,3}gb(\.me)?")
FILLED = ("world", "rank", "node", "nodes", "attempt", "job", "folder")

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Level = Literal["block", "rack", "host"]
"""how near nodes are: under one spine, in one rack, on one host"""


Metric = Literal["cairn_waiting_requests", "cairn_running_requests", "cairn_open_requests"]


class Part(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Every part of a job: unknown fields are refused, what is left at its default is not written."""


class Role(Part, frozen=True, kw_only=True):
    """Nodes that do the same."""

    name: str = "worker"
    argv: list[str] = []
    """the program; `cairn` is the one that launches"""
    nodes: int | tuple[int, int] = 1  # unmarked: msgspec 0.22 crashes on limits inside such a union
    """how many, or the least and the most"""
    gpus: Count = 0
    """of each node"""
    mig: str = ""
    """a slice instead of whole GPUs, such as 1g.10gb: then `gpus` counts slices"""
    cpus: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    memory: str = "1GiB"
    ranks: Count = 0
    """processes of each node; 0: one for each GPU, at least one"""
    start: Literal["elastic", "direct"] = "elastic"
    """elastic: ranks that talk to each other, through torch elastic; direct: the program as it is"""
    env: dict[str, str] = {}
    image: str | None = None

    @property
    def least(self) -> int:
        return self.nodes if isinstance(self.nodes, int) else self.nodes[0]

    @property
    def most(self) -> int:
        return self.nodes if isinstance(self.nodes, int) else self.nodes[1]

    @property
    def ranks_per_node(self) -> int:
        return self.ranks or max(1, self.gpus)

    def __post_init__(self) -> None:
        _check_name(self.name, "a role")
        if not self.argv:
            raise ConfigError(f"role '{self.name}' has no argv", hint='argv = ["cairn", "train"]')
        if self.least < 1:
            raise ConfigError(f"role '{self.name}': nodes is {self.least}", hint="nodes = 1")
        if self.least > self.most:
            raise ConfigError(
                f"role '{self.name}': nodes = [{self.least}, {self.most}] has more at least than at most",
                hint=f"nodes = [{self.most}, {self.least}]",
            )
        if self.mig and not MIG.fullmatch(self.mig):
            raise ConfigError(
                f"role '{self.name}': mig = '{self.mig}' is no MIG profile", hint="such as 1g.10gb"
            )
        _check_written(parse_bytes, self.memory, f"memory of role '{self.name}'")
        _check_env(self.env, f"role '{self.name}'")
        for word in (*self.argv, *self.env.values()):
            _check_filled(word, f"role '{self.name}'")


class Topology(Part, frozen=True, kw_only=True):
    """Required or preferred topology of the nodes."""

    required: Level | None = None
    """not started otherwise"""
    preferred: Level | None = None
    """tried first"""


class Elastic(Part, frozen=True, kw_only=True):
    """Scaling of a job with (least, most) nodes."""

    regrow: bool = True
    """takes a node back when there is one"""
    regrow_after: str = "0s"
    """how long after the loss it is asked for"""
    last_call: str = "2s"
    """how long a round waits for more nodes once the least are there"""


class Restart(Part, frozen=True, kw_only=True):
    """Restart policy for a lost rank or node."""

    policy: Literal["in_place", "shrink", "requeue", "fail"] = "in_place"
    """in_place: the same nodes again; shrink: with those left; requeue: back to the queue; fail: never again"""
    max: Count = 3
    """so many times in all"""
    grace: str = "10s"
    """between SIGTERM and SIGKILL"""


class Checkpoint(Part, frozen=True, kw_only=True):
    """Checkpoint storage of the job."""

    folder: str | None = None
    """{folder} in argv; a folder that holds another job's run is refused"""
    interval: Literal["auto", "recipe"] = "recipe"
    """as the program's recipe says, or auto: by Young and Daly from the measured cost and failure rate"""
    tiers: tuple[Literal["memory", "disk", "object"], ...] = ("disk",)
    """memory: copies of every rank's state on another node, too; object: also in `object_store`"""
    object_store: str = ""
    """s3://bucket/run, file:///mnt/run"""


class Health(Part, frozen=True, kw_only=True):
    """When a node or a rank counts as lost."""

    heartbeat: str = "1s"
    missed: Positive = 3
    """heartbeats in a row"""
    hang: str = "10m"
    """a collective that takes longer hangs"""
    straggler: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """a rank that computes so many times longer than the median of the others is named; 0: as the program does"""
    slow: Literal["tell", "replace"] = "tell"
    """what is done about such a rank: it is named, or its node is replaced"""
    check: Literal["off", "warn", "refuse"] = "warn"
    """a node that is not fit for work when its ranks start (memory, disk, GPUs): said in the log, or not used"""


class Array(Part, frozen=True, kw_only=True):
    """The same job many times; CAIRN_ARRAY_INDEX says which one it is."""

    count: Positive = 1
    parallel: Count = 0
    """at once; 0: all"""


class Scale(Part, frozen=True, kw_only=True):
    """Autoscaling of a server by one of its own metrics."""

    least: Positive = 1
    most: Positive = 1
    metric: Metric = "cairn_waiting_requests"
    target: Annotated[float, msgspec.Meta(gt=0)] = 8.0
    """of each copy; more than that adds one"""
    actuator: Literal["hpa", "keda"] = "hpa"


class Job(Part, frozen=True, kw_only=True):
    """All that decides how a job is placed, started, watched and started again."""

    version: int = VERSION
    name: str
    kind: Literal["train", "serve"] = "train"
    """serve: copies behind one address that never end, instead of ranks that do"""
    roles: list[Role]
    image: str | None = None
    """the container image of roles that name none"""
    env: dict[str, str] = {}
    queue: str | None = None
    """Slurm's partition, Kueue's or Volcano's queue"""
    priority: str | None = None
    """a class of the engine: a priority class or a QOS"""
    gang: bool = True
    """all nodes at once or none"""
    topology: Topology = Topology()
    time_limit: str = "24h"
    """without one no job could pass a waiting one"""
    deadline: datetime.datetime | None = None
    """to be finished by then; a job that cannot be is dropped"""
    after: list[str] = []
    """jobs that have to be done before"""
    array: Array = Array()
    elastic: Elastic = Elastic()
    restart: Restart = Restart()
    checkpoint: Checkpoint = Checkpoint()
    health: Health = Health()
    scale: Scale = Scale()
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 8000
    """of a server"""

    @property
    def seconds(self) -> float:
        return parse_duration(self.time_limit)

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ConfigError(
                f"job '{self.name}' is of version {self.version}; this is version {VERSION}",
                hint="a newer Cairn wrote it" if self.version > VERSION else f"version = {VERSION}",
            )
        _check_name(self.name, "a job")
        _check_roles(self)
        _check_env(self.env, f"job '{self.name}'")
        for word in self.env.values():
            _check_filled(word, f"job '{self.name}'")
        _check_times(self)
        if self.scale.least > self.scale.most:
            raise ConfigError(
                f"scale.least {self.scale.least} is more than scale.most {self.scale.most}",
                hint=f"scale.most = {self.scale.least}",
            )


def _check_roles(job: Job) -> None:
    names = [role.name for role in job.roles]
    if not names:
        raise ConfigError(f"job '{job.name}' has no roles", hint="write [[roles]] with an argv")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(
            f"job '{job.name}' has two roles '{min(twice)}'",
            hint="give each role a name of its own",
        )
    if job.restart.policy == "shrink" and all(role.least == role.most for role in job.roles):
        raise ConfigError(
            f"job '{job.name}' is to shrink, but every role has a fixed number of nodes",
            hint=f'nodes = [1, {job.roles[0].most}], or restart.policy = "in_place"',
        )


def _check_times(job: Job) -> None:
    for field, text in (
        ("time_limit", job.time_limit),
        ("elastic.last_call", job.elastic.last_call),
        ("elastic.regrow_after", job.elastic.regrow_after),
        ("restart.grace", job.restart.grace),
        ("health.heartbeat", job.health.heartbeat),
        ("health.hang", job.health.hang),
    ):
        _check_written(parse_duration, text, field)
    if job.seconds <= 0:
        raise ConfigError("time_limit is zero", hint='such as "2h"')
    if job.deadline is not None and job.deadline.tzinfo is None:
        raise ConfigError(
            f"deadline {job.deadline.isoformat()} has no time zone",
            hint=f"{job.deadline.isoformat()}Z is in UTC",
        )
    if "object" in job.checkpoint.tiers and not job.checkpoint.object_store:
        raise ConfigError(
            "checkpoint.tiers names 'object', but there is no checkpoint.object_store",
            hint='object_store = "s3://bucket/run"',
        )


def _check_written(parse: Callable[[str], float], text: str, field: str) -> None:
    """A size or a duration that cannot be read is refused by the name of its field."""
    try:
        parse(text)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error.message}", hint=error.hint) from None


def _check_name(name: str, what: str) -> None:
    if not NAME.fullmatch(name):
        meant = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:40] or "my-job"
        raise ConfigError(
            f"'{name}' cannot be the name of {what}",
            hint=f"lower-case letters, digits and dashes, at most 40, such as '{meant}'",
        )


def _check_env(env: dict[str, str], where: str) -> None:
    for name in env:
        if not VARIABLE.fullmatch(name):
            raise ConfigError(
                f"{where}: env '{name}' is no name of a variable", hint="letters, digits and _"
            )


def _check_filled(word: str, where: str) -> None:
    """A typo is refused; braces in a program's own text are its own business."""
    from cairn.core.errors import did_you_mean

    for word_in_braces in re.findall(r"\{([a-z_]+)\}", word):
        near = did_you_mean(word_in_braces, FILLED)
        if word_in_braces in FILLED or (near is None and re.search(r"\s", word)):
            continue
        names = ", ".join(f"{{{name}}}" for name in FILLED)
        raise ConfigError(
            f"{where}: nothing is known to put for {{{word_in_braces}}} in {word!r}",
            hint=near or f"there are {names}",
        )
