"""The schemas of Kubernetes's custom resources, strict: what they do not name is an error."""

import functools
from pathlib import Path

import jsonschema
import yaml
from shared_data import shared

FILES = {
    "JobSet": "kubernetes-sigs_jobset.x-k8s.io_jobsets.yaml",
    "Job": "volcano-sh_batch.volcano.sh_jobs.yaml",
    "RayJob": "ray-project_ray.io_rayjobs.yaml",
}
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check(made):
    """Raises jsonschema.ValidationError where the object is not what its CRD says."""
    path = shared("crds", FILES[made["kind"]])
    schema = _schema(path, made["apiVersion"].rpartition("/")[2])
    jsonschema.Draft202012Validator(schema).validate({k: v for k, v in made.items() if k == "spec"})


def check_pod(template):
    """A pod template, wherever it stands: the one inside the JobSet is Kubernetes's own."""
    path = shared("crds", FILES["JobSet"])
    job = _schema(path, "v1alpha2")["properties"]["spec"]["properties"]["replicatedJobs"]["items"]
    spec = job["properties"]["template"]["properties"]["spec"]["properties"]["template"]
    jsonschema.Draft202012Validator(spec).validate(template)


@functools.cache
def _schema(path: Path, version: str):
    crd = yaml.load(path.read_text(), Loader=LOADER)
    (found,) = [v for v in crd["spec"]["versions"] if v["name"] == version]
    return _strict(found["schema"]["openAPIV3Schema"])


def _strict(schema):
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        k: _strict(v)
        for k, v in schema.items()
        if not k.startswith("x-kubernetes") and k != "description"
    }
    named = isinstance(made.get("properties"), dict) and "type" in made
    if named and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made
