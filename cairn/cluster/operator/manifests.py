"""The files that install the operator: a folder for kustomize, or a Helm chart, from the same objects. Pure.

kustomize   kustomization.yaml, crds.yaml, operator.yaml                  kubectl apply --server-side --kustomize FOLDER
helm        Chart.yaml, values.yaml, crds/*.yaml, templates/operator.yaml helm install cairn-operator FOLDER
"""

from collections.abc import Sequence

import msgspec

from cairn.cluster.backends.k8s_pod import USER
from cairn.cluster.backends.kubernetes import to_yaml
from cairn.cluster.operator.crd import Definition, crd
from cairn.cluster.operator.objects import GROUP, Object, plural

NAME = "cairn-operator"
READ = ["get", "list", "watch"]
WRITE = [*READ, "create", "patch", "delete"]  # server-side apply is a patch
CHILDREN = {  # by group
    "": ("configmaps", "services", "secrets", "pods", "persistentvolumeclaims"),
    "apps": ("deployments",),
    "batch": ("jobs",),
    "policy": ("poddisruptionbudgets",),
    "jobset.x-k8s.io": ("jobsets",),
    "batch.volcano.sh": ("jobs",),
    "ray.io": ("rayjobs",),
    "inference.networking.k8s.io": ("inferencepools",),
    "keda.sh": ("scaledobjects",),
}
RBAC = "rbac.authorization.k8s.io"
# Its own Lease and no other: those of the cluster's controllers and nodes are none of its business.
LEASE_RULES: list[Object] = [
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
    {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "resourceNames": [NAME],
        "verbs": ["get", "update"],
    },
]


class Values(msgspec.Struct, frozen=True, kw_only=True):
    """Values that differ between installations; for Helm they are template expressions."""

    namespace: str = "cairn-system"
    image: str = "cairn:cpu"
    replicas: int | str = 2  # one leads, the others wait for its Lease
    memory: str = "256Mi"


HELM = Values(
    namespace="{{ .Release.Namespace }}",
    image="{{ .Values.image }}",
    replicas="{{ .Values.replicas }}",
    memory="{{ .Values.memory }}",
)


def kustomize_files(
    definitions: Sequence[Definition], values: Values, version: str
) -> dict[str, str]:
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": values.namespace}}
    listed: Object = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["crds.yaml", "operator.yaml"],
    }
    return {
        "kustomization.yaml": to_yaml([listed]),
        "crds.yaml": to_yaml([crd(one) for one in definitions]),
        "operator.yaml": to_yaml([namespace, *operator_objects(definitions, values)]),
    }


def helm_files(definitions: Sequence[Definition], values: Values, version: str) -> dict[str, str]:
    chart: Object = {
        "apiVersion": "v2",
        "name": NAME,
        "description": "Model, InferenceService and TrainJob objects of Cairn",
        "type": "application",
        "version": version,
        "appVersion": version,
    }
    given = {"image": values.image, "replicas": values.replicas, "memory": values.memory}
    template = to_yaml(operator_objects(definitions, HELM))
    template = template.replace(f"'{HELM.replicas}'", str(HELM.replicas))  # a number, not a text
    return {
        "Chart.yaml": to_yaml([chart]),
        "values.yaml": to_yaml([given]),
        "templates/operator.yaml": template,
        **{f"crds/{plural(one.kind)}.yaml": to_yaml([crd(one)]) for one in definitions},
    }


def operator_objects(definitions: Sequence[Definition], values: Values) -> list[Object]:
    """An account with the rights that the operator uses and no others, and the operator itself."""
    where = {"name": NAME, "namespace": values.namespace}
    subject = {"kind": "ServiceAccount", **where}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": where},
        *_rights("Cluster", {"name": NAME}, _rules(definitions), subject),
        *_rights("", where, LEASE_RULES, subject),
        _deployment(where, values),
    ]


def _rights(scope: str, where: Object, rules: list[Object], subject: Object) -> list[Object]:
    """A role and its binding, of the whole cluster or of the namespace in `where`."""
    role = {"apiGroup": RBAC, "kind": f"{scope}Role", "name": NAME}
    return [
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": f"{scope}Role",
            "metadata": where,
            "rules": rules,
        },
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": f"{scope}RoleBinding",
            "metadata": where,
            "roleRef": role,
            "subjects": [subject],
        },
    ]


def _rules(definitions: Sequence[Definition]) -> list[Object]:
    own = [plural(one.kind) for one in definitions]
    rules: list[Object] = [
        {"apiGroups": [GROUP], "resources": own, "verbs": [*READ, "patch"]},
        {"apiGroups": [GROUP], "resources": [f"{one}/status" for one in own], "verbs": ["patch"]},
        # With OwnerReferencesPermissionEnforcement, an object that blocks a deletion needs the right to write
        # finalizers.
        {
            "apiGroups": [GROUP],
            "resources": [f"{one}/finalizers" for one in own],
            "verbs": ["update"],
        },
    ]
    return rules + [
        {"apiGroups": [group], "resources": list(kinds), "verbs": WRITE}
        for group, kinds in CHILDREN.items()
    ]


def _deployment(where: Object, values: Values) -> Object:
    marks = {"app.kubernetes.io/name": NAME}
    container = {
        "name": "operator",
        "image": values.image,
        "command": ["cairn", "operator", "run", "--lease-namespace", values.namespace],
        "resources": {
            "requests": {"cpu": "100m", "memory": values.memory},
            "limits": {"memory": values.memory},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    pod = {
        "serviceAccountName": NAME,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "enableServiceLinks": False,
        "containers": [container],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**where, "labels": marks},
        "spec": {
            "replicas": values.replicas,
            "selector": {"matchLabels": marks},
            "template": {"metadata": {"labels": marks}, "spec": pod},
        },
    }
