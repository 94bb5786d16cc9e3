"""The kinds Model and TrainJob as CRDs. InferenceService is defined where fleets are (`cairn/fleet/service.py`)."""

from cairn.cluster.operator.crd import CelRule, Definition
from cairn.cluster.operator.model import ModelResourceSpec
from cairn.cluster.operator.train_job import TrainTarget
from cairn.cluster.spec import Job

MODEL = Definition(
    kind="Model",
    short="cmodel",
    spec=ModelResourceSpec,
    rules=(
        CelRule(
            "source",
            "self == oldSelf",
            "source cannot change: servers may be reading it; make another Model",
        ),
        CelRule(
            "revision",
            "self == oldSelf",
            "revision cannot change: servers may be reading it; make another Model",
        ),
    ),
    status={"source": {"type": "string"}, "claim": {"type": "string"}},
    columns=(("Source", ".spec.source"),),
)
TRAIN_JOB = Definition(
    kind="TrainJob",
    short="ctrain",
    spec=Job,
    more=TrainTarget,
    without=("name", "version", "kind", "scale", "port", "array", "after"),
    rules=(
        CelRule("", "size(self.roles) > 0", "roles is empty: a job has at least one"),
        CelRule("roles[]", "has(self.argv) && size(self.argv) > 0", "a role has no argv"),
    ),
    limits=(("roles", 16),),
    status={
        "phase": {"type": "string"},
        "target": {"type": "string"},
        "attempt": {"type": "integer"},
    },
    columns=(("Phase", ".status.phase"), ("Attempt", ".status.attempt")),
)
