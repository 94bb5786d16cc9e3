"""The files that install the operator: CRDs that say what the classes say, rights for what is made, two forms."""

import shutil
import subprocess
from pathlib import Path

import jsonschema
import msgspec
import pytest
import yaml

from cairn.cli.cluster.operator import definitions
from cairn.cli.main import main
from cairn.cluster.job_file import job_json, read_job
from cairn.cluster.operator.crd import crd
from cairn.cluster.operator.manifests import HELM, Values, helm_files, kustomize_files
from cairn.cluster.operator.objects import plural
from cairn.cluster.operator.run import CHILDREN, OPTIONAL
from cairn.fleet.config import read_fleet
from cairn.fleet.service import service_object

EXAMPLES = Path(__file__).parents[2] / "examples"
DEFINITIONS = {one.kind: one for one in definitions()}


def schema(kind, part="spec"):
    whole = crd(DEFINITIONS[kind])["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return whole["properties"][part]


def valid(kind, spec):
    """As an API server checks it: OpenAPI 3.0 says exclusiveMinimum and nullable in its own way."""
    jsonschema.Draft202012Validator(_modern(schema(kind))).validate(spec)


def _modern(part):
    if isinstance(part, list):
        return [_modern(one) for one in part]
    if not isinstance(part, dict):
        return part
    made = {key: _modern(value) for key, value in part.items() if not key.startswith("x-")}
    if made.pop("exclusiveMinimum", None) is True:
        made["exclusiveMinimum"] = made.pop("minimum")
    if made.get("type") == "object" and "properties" in made:
        made["additionalProperties"] = False
    return made


def test_every_example_is_valid_as_an_object():
    for path in (EXAMPLES / "fleet").glob("*.toml"):
        valid("InferenceService", service_object(read_fleet(path))["spec"])
    for path in (EXAMPLES / "jobs").glob("train*.toml"):
        values = msgspec.json.decode(job_json(read_job(path)))
        valid("TrainJob", {k: v for k, v in values.items() if k not in ("name", "version", "kind")})
    with pytest.raises(jsonschema.ValidationError):
        valid("InferenceService", {"servers": [{"model": "m", "cpus": 0}]})


def test_schemas_are_structural():
    """Every part has a type, or says that it is left open: otherwise an API server refuses the CRD."""

    def check(part, path):
        assert "type" in part or part.get("x-kubernetes-preserve-unknown-fields"), path
        assert not {"$ref", "anyOf", "default", "title"} & part.keys(), path
        for name, one in part.get("properties", {}).items():
            check(one, f"{path}.{name}")
        for key in ("items", "additionalProperties"):
            if key in part:
                check(part[key], f"{path}[]")

    for kind in DEFINITIONS:
        check(schema(kind), kind)
        check(schema(kind, "status"), kind)


RULES = [
    ("InferenceService", "servers[]", {"model": "m"}, True),
    ("InferenceService", "servers[]", {"model": "m", "dns": "a:1"}, False),
    ("InferenceService", "servers[]", {}, False),
    ("InferenceService", "servers[]", {"model": "m", "least": 2, "most": 1}, False),
    ("InferenceService", "servers[]", {"model": "m", "least": 1}, False),
    ("InferenceService", "", {"servers": []}, False),
    ("TrainJob", "roles[]", {"argv": []}, False),
    ("TrainJob", "roles[]", {"argv": ["a"]}, True),
]


@pytest.mark.parametrize(("kind", "at", "value", "ok"), RULES)
def test_cel_rules_say_what_the_classes_say(kind, at, value, ok):
    celpy = pytest.importorskip("celpy", reason="needs cel-python, an interpreter of CEL")
    env = celpy.Environment()
    rules = [one for one in DEFINITIONS[kind].rules if one.at == at]
    found = [
        bool(env.program(env.compile(one.rule)).evaluate({"self": celpy.json_to_cel(value)}))
        for one in rules
    ]
    assert all(found) is ok


def test_the_account_may_do_what_the_operator_does_and_no_more():
    (text,) = (kustomize_files(definitions(), Values(), "1")["operator.yaml"],)
    (role,) = [one for one in yaml.safe_load_all(text) if one["kind"] == "ClusterRole"]
    may = {
        (group, resource): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    for api, kind in (*CHILDREN, *OPTIONAL):
        verbs = may[api.rpartition("/")[0], plural(kind)]
        assert {"list", "watch", "patch", "delete"} <= verbs
        assert "update" not in verbs
    for kind in DEFINITIONS:
        assert "patch" in may["cairn.dev", f"{plural(kind)}/status"]
        assert not {"delete", "create", "update"} & may["cairn.dev", plural(kind)]
    assert not any("*" in pair or "leases" in pair for pair in may)
    (own,) = [one for one in yaml.safe_load_all(text) if one["kind"] == "Role"]
    assert own["metadata"]["namespace"] == Values().namespace
    assert [one.get("resourceNames") for one in own["rules"]] == [None, ["cairn-operator"]]


def test_helm_and_kustomize_install_the_same():
    values = Values(namespace="here", image="registry/cairn:1", replicas=3, memory="1Gi")
    chart = helm_files(definitions(), values, "1.2.3")
    text, given = chart["templates/operator.yaml"], yaml.safe_load(chart["values.yaml"])
    text = text.replace(HELM.namespace, "here")
    for name, value in given.items():
        text = text.replace(f"{{{{ .Values.{name} }}}}", str(value))
    assert "{{" not in text
    plain = kustomize_files(definitions(), values, "1.2.3")
    kinds = list(yaml.safe_load_all(plain["operator.yaml"]))
    assert list(yaml.safe_load_all(text)) == [one for one in kinds if one["kind"] != "Namespace"]
    crds = [yaml.safe_load(chart[name]) for name in chart if name.startswith("crds/")]
    assert crds == list(yaml.safe_load_all(plain["crds.yaml"]))
    assert yaml.safe_load(chart["Chart.yaml"])["version"] == "1.2.3"


def test_kustomize_reads_the_folder(tmp_path, capsys):
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    assert main(["operator", "manifests", str(tmp_path / "k"), "--namespace", "here"]) == 0
    done = subprocess.run(
        ["kubectl", "kustomize", tmp_path / "k"], capture_output=True, text=True, check=True
    )
    made = list(yaml.safe_load_all(done.stdout))
    assert sorted(one["kind"] for one in made if "Cluster" not in one["kind"]) == [
        "CustomResourceDefinition",
        "CustomResourceDefinition",
        "CustomResourceDefinition",
        "Deployment",
        "Namespace",
        "Role",
        "RoleBinding",
        "ServiceAccount",
    ]
    assert "kustomize" in capsys.readouterr().out
