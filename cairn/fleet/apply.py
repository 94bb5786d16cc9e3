"""Rendering of a fleet file for four engines. Pure.

    local, ray, slurm    a job of one node that runs `cairn fleet serve`: the router and its servers, each with its GPUs
    kubernetes           servers as a Deployment behind a headless Service, the router as another in front of them

On Kubernetes the router finds the servers by resolving the headless Service, so that copies may come and go, and takes
its file again when it has changed. Groups with `least` and `most` are scaled by KEDA, which asks the router how many.
"""

from typing import Any

import msgspec

from cairn.cluster.backends.k8s_pod import USER, Object
from cairn.cluster.job_file import job_from
from cairn.cluster.operator.model import FOLDER as MODELS
from cairn.cluster.operator.model import PREFIX, claim_name
from cairn.cluster.operator.objects import KEDA_API, POOL_API
from cairn.cluster.spec import Job
from cairn.core import toml
from cairn.core.errors import ConfigError
from cairn.core.units import parse_bytes
from cairn.fleet.config import FleetConfig, ServerGroup
from cairn.serve.token_marks import ROUTER_SECRET

PORT = 8000  # of every server, and of the router, inside its pod
PICKER_PORT, SCALER_PORT = 9002, 9000
KEDA_ASKS_S = 5
SERVES = {"cairn/serves": "requests"}  # label of the pods of servers, whatever their group
ANY = "0.0.0.0"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
FOLDER = "/etc/cairn"
ROUTER_CPUS, ROUTER_BYTES = 1.0, 1 << 30
LOADING_S = 1800  # a large model may take that long before it answers


def check_for(config: FleetConfig, engine: str) -> None:
    """Reject what an engine cannot place before anything is created."""
    if not any(group.model for group in config.servers):
        raise ConfigError(
            f"the fleet '{config.name}' starts no servers, so there is nothing to place on {engine}",
            hint="give a group of servers a `model`; for servers that run already use `cairn fleet serve`",
        )
    stored = [group.model for group in config.servers if group.model.startswith(PREFIX)]
    if stored and engine != "kubernetes":
        raise ConfigError(
            f"{stored[0]!r} is a Model object of Kubernetes, and the engine is {engine}",
            hint="name a folder or a repository",
        )


def notes_on(config: FleetConfig, engine: str) -> list[str]:
    """Notes about effects of an engine that the author of the file may not expect."""
    notes: list[str] = []
    scaled = [group for group in config.servers if group.scaled]
    if scaled and engine == "kubernetes":
        notes.append("servers are scaled between `least` and `most` by KEDA, if the cluster has it")
    elif scaled:
        most = sum(group.most_servers for group in scaled)
        notes.append(f"the job holds room for `most` servers all the time, {most} of scaled groups")
    if engine == "kubernetes":
        name = f"{config.name}-router"
        notes.append(
            f"answers whose server is lost continue on another one if there is a Secret {name}: kubectl create secret "
            f"generic {name} --from-literal=secret=$(openssl rand -hex 32), then restart both Deployments"
        )
    if engine in ("ray", "slurm") and config.router.host in LOOPBACK:
        notes.append(
            f"the router listens on {config.router.host} of its node alone;"
            ' `host = "0.0.0.0"` under [router] lets other machines reach it'
        )
    return notes


def job_of(config: FleetConfig, file: str) -> Job:
    """The whole fleet on one node; `file` is where that node finds it."""
    started = [group for group in config.servers if group.model]
    memory = ROUTER_BYTES + sum(one.most_servers * parse_bytes(one.memory) for one in started)
    role = {
        "name": "fleet",
        "argv": ["cairn", "fleet", "serve", "--watch", file],
        "start": "direct",
        "ranks": 1,
        "gpus": sum(group.most_servers * group.gpus for group in started),
        "cpus": ROUTER_CPUS + sum(group.most_servers * group.cpus for group in started),
        "memory": f"{memory >> 20}MiB",
    }
    values: dict[str, Any] = {"version": 1, "name": config.name, "roles": [role]}
    return job_from(values, file)


def objects_of(config: FleetConfig, namespace: str = "default") -> list[Object]:
    """Kubernetes objects in the order of the servers. `namespace` is their namespace, which KEDA needs."""
    servers: list[Object] = []
    groups: list[ServerGroup] = []
    for at, group in enumerate(config.servers):
        if not group.model:
            groups.append(group)
            continue
        name = f"{config.name}-servers-{at}"
        servers += [_headless(config, name), _servers(config, group, name), _budget(config, name)]
        if group.scaled:
            servers.append(_scaled_object(config, group, name, namespace))
        groups.append(ServerGroup(dns=f"{name}:{PORT}"))
    more = [_picker_service(config), _pool(config)] if config.inference_pool else []
    if _is_scaled(config):
        more.append(_grpc_service(config, "scaler", SCALER_PORT))
    return [_config_map(config, groups), *servers, _router(config), _client_service(config), *more]


def _is_scaled(config: FleetConfig) -> bool:
    return any(group.scaled for group in config.servers)


def _meta(config: FleetConfig, name: str, part: str) -> Object:
    return {"name": name, "labels": _labels(config, part)}


def _labels(config: FleetConfig, part: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": config.name,
        "app.kubernetes.io/component": part,
        "app.kubernetes.io/managed-by": "cairn",
        "cairn/fleet": config.name,
        "cairn/part": part,
    }


def _config_map(config: FleetConfig, groups: list[ServerGroup]) -> Object:
    """The fleet as the router in the cluster sees it: names instead of servers to start."""
    router = msgspec.structs.replace(config.router, host=ANY, port=PORT)
    lines = [f"name = {toml.render_value(config.name)}", "", "[router]", *_changed(router)]
    tables = (("servers", groups), ("aliases", config.aliases), ("keys", config.keys))
    for name, parts in tables:
        for part in parts:
            lines += ["", f"[[{name}]]", *_changed(part)]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _meta(config, f"{config.name}-router", "router"),
        "data": {"fleet.toml": "\n".join(lines) + "\n"},
    }


def changed_fields(part: msgspec.Struct) -> dict[str, Any]:
    """Fields that differ from the defaults."""
    changed: dict[str, Any] = {}
    for field in msgspec.structs.fields(type(part)):
        factory, value = field.default_factory, getattr(part, field.name)
        usual = field.default if factory is msgspec.NODEFAULT else factory()  # type: ignore[operator]
        if value != usual:
            changed[field.name] = value
    return changed


def _changed(part: msgspec.Struct) -> list[str]:
    """The same as TOML."""
    return [f"{key} = {toml.render_value(value)}" for key, value in changed_fields(part).items()]


def _headless(config: FleetConfig, name: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(config, name, name),
        "spec": {
            "clusterIP": "None",
            "selector": {"cairn/fleet": config.name, "cairn/part": name},
            "ports": [{"name": "http", "port": PORT, "protocol": "TCP"}],
        },
    }


def _servers(config: FleetConfig, group: ServerGroup, name: str) -> Object:
    model = group.model.removeprefix(PREFIX)
    stored = model != group.model  # on the volume of a Model object
    path, named = (f"{MODELS}/{model}", ["--served-model-name", model]) if stored else (model, [])
    if "--served-model-name" in group.args:
        named = []
    argv = ["cairn", "serve", path, *named, *group.args, "--host", ANY, "--port", str(PORT)]
    memory = f"{-(-parse_bytes(group.memory) // (1 << 20))}Mi"
    requests, limits = {"cpu": f"{group.cpus:g}", "memory": memory}, {"memory": memory}
    if group.gpus:
        requests["nvidia.com/gpu"] = limits["nvidia.com/gpu"] = str(group.gpus)
    container = _container(config, argv, {"requests": requests, "limits": limits}) | {
        "startupProbe": {**_probe("/health"), "failureThreshold": LOADING_S // 5},
        "livenessProbe": {**_probe("/live"), "failureThreshold": 6},
    }
    # The number of servers that come and go is KEDA's.
    count = None if group.scaled else group.count
    deployment = _deployment(config, name, name, count, container)
    if config.inference_pool:  # a label more would exchange the servers of fleets without one
        deployment["spec"]["template"]["metadata"]["labels"] |= SERVES
    if stored:
        container["volumeMounts"] = [{"name": "model", "mountPath": MODELS, "readOnly": True}]
        claim = {"claimName": claim_name(model), "readOnly": True}
        pod = deployment["spec"]["template"]["spec"]
        pod["volumes"] = [{"name": "model", "persistentVolumeClaim": claim}]
    return deployment


def _router(config: FleetConfig) -> Object:
    name = f"{config.name}-router"
    argv = ["cairn", "fleet", "serve", f"{FOLDER}/fleet.toml", "--watch"]
    argv += ["--keda", f"{ANY}:{SCALER_PORT}"] if _is_scaled(config) else []
    argv += ["--endpoint-picker", f"{ANY}:{PICKER_PORT}"] if config.inference_pool else []
    memory = f"{ROUTER_BYTES >> 20}Mi"
    resources = {
        "requests": {"cpu": f"{ROUTER_CPUS:g}", "memory": memory},
        "limits": {"memory": memory},
    }
    container = _container(config, argv, resources)
    container["volumeMounts"] = [{"name": "fleet", "mountPath": FOLDER, "readOnly": True}]
    deployment = _deployment(config, name, "router", 1, container)
    deployment["spec"]["template"]["spec"]["volumes"] = [
        {"name": "fleet", "configMap": {"name": name}}
    ]
    return deployment


def _container(config: FleetConfig, argv: list[str], resources: Object) -> Object:
    return {
        "name": "cairn",
        "image": config.image,
        "command": argv,
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "readinessProbe": _probe("/health"),
        "resources": resources,
        "env": [_router_secret(config)],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "runAsUser": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _router_secret(config: FleetConfig) -> Object:
    """Optional secret with which the router proves to servers that it may continue answers."""
    secret = {"name": f"{config.name}-router", "key": "secret", "optional": True}
    return {"name": ROUTER_SECRET, "valueFrom": {"secretKeyRef": secret}}


def _probe(path: str) -> Object:
    return {"httpGet": {"path": path, "port": "http"}, "periodSeconds": 5}


def _deployment(
    config: FleetConfig, name: str, part: str, count: int | None, container: Object
) -> Object:
    """`count`: None leaves the number to an autoscaler."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(config, name, part),
        "spec": {
            **({"replicas": count} if count is not None else {}),
            "selector": {"matchLabels": {"cairn/fleet": config.name, "cairn/part": part}},
            "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {
                "metadata": {"labels": _labels(config, part)},
                "spec": {
                    "containers": [container],
                    "terminationGracePeriodSeconds": 45,  # a server finishes what it answers
                    "automountServiceAccountToken": False,
                    # A Service called cairn-serve would otherwise set variables that look like settings.
                    "enableServiceLinks": False,
                },
            },
        },
    }


def _budget(config: FleetConfig, name: str) -> Object:
    selector = {"matchLabels": {"cairn/fleet": config.name, "cairn/part": name}}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _meta(config, name, name),
        "spec": {"maxUnavailable": 1, "selector": selector},
    }


def _scaled_object(config: FleetConfig, group: ServerGroup, name: str, namespace: str) -> Object:
    """KEDA asks the router how many servers there should be, also while there is none."""
    asked = {
        "scalerAddress": f"{config.name}-scaler.{namespace}:{SCALER_PORT}",
        "model": group.names[0].removeprefix(PREFIX),
        "least": str(group.least),
        "most": str(group.most),
        "ttft_s": f"{group.ttft_s:g}",
        "idle_s": f"{group.idle_s:g}",
    }
    return {
        "apiVersion": KEDA_API,
        "kind": "ScaledObject",
        "metadata": _meta(config, name, name),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicaCount": group.least,
            "maxReplicaCount": group.most,
            "pollingInterval": KEDA_ASKS_S,
            "cooldownPeriod": KEDA_ASKS_S,  # `idle_s` is over by then
            "triggers": [{"type": "external", "metadata": asked}],
        },
    }


def _picker_service(config: FleetConfig) -> Object:
    """Service through which a gateway queries the router for the server of a request."""
    return _grpc_service(config, "picker", PICKER_PORT)


def _grpc_service(config: FleetConfig, part: str, number: int) -> Object:
    """Service for the router's gRPC interfaces, without TLS."""
    port = {"name": part, "port": number, "protocol": "TCP", "targetPort": number}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(config, f"{config.name}-{part}", "router"),
        "spec": {
            "selector": {"cairn/fleet": config.name, "cairn/part": "router"},
            "ports": [port],
        },
    }


def _pool(config: FleetConfig) -> Object:
    """All servers of the fleet, as a backend of an HTTPRoute."""
    return {
        "apiVersion": POOL_API,
        "kind": "InferencePool",
        "metadata": _meta(config, config.name, "router"),
        "spec": {
            "selector": {"matchLabels": {"cairn/fleet": config.name, **SERVES}},
            "targetPorts": [{"number": PORT}],
            "endpointPickerRef": {
                "kind": "Service",
                "name": f"{config.name}-picker",
                "port": {"number": PICKER_PORT},
                "failureMode": "FailClose",
            },
        },
    }


def _client_service(config: FleetConfig) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(config, config.name, "router"),
        "spec": {
            "selector": {"cairn/fleet": config.name, "cairn/part": "router"},
            "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": "http"}],
        },
    }
