"""A real control plane of Kubernetes on this machine (etcd, API server, controllers, scheduler) and a small kubelet.

The binaries are those of the shared data, or those that CAIRN_KUBE_ASSETS names.
"""

import contextlib
import os
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
import yaml
from shared_data import shared

START_S = float(os.environ.get("CAIRN_KUBE_START_S", "60"))


@contextlib.contextmanager
def control_plane(folder: Path):
    """The path of a kubeconfig; ends everything that it started."""
    start = shared("kube", "start")
    for tool in ("etcd", "openssl", "curl", "xz"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    with (folder / "start.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", str(start), str(folder / "kube"), "0", "all"], stdout=log, stderr=log
        )
        try:
            yield _ready(folder, process)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:  # its shell waits for a curl that hangs
                process.kill()
                process.wait()


def _ready(folder: Path, process: subprocess.Popen) -> Path:
    path, until = folder / "kube" / "kubeconfig", time.monotonic() + START_S
    while time.monotonic() < until:
        assert process.poll() is None, (folder / "start.log").read_text()
        if path.exists() and (text := path.read_text()).endswith("\n"):
            config = yaml.safe_load(text)
            with contextlib.suppress(Exception):
                if _get(config, "/readyz") == "ok":
                    return path
        time.sleep(0.2)
    raise AssertionError(f"not ready after {START_S} s: {(folder / 'start.log').read_text()}")


def _get(config, path: str) -> str:
    import httpx2

    server, user = config["clusters"][0]["cluster"]["server"], config["users"][0]["user"]
    headers = {"Authorization": f"Bearer {user['token']}"}
    return httpx2.get(server + path, headers=headers, verify=False, timeout=20).text


def server_version(path: Path) -> tuple[int, int]:
    text = _get(yaml.safe_load(path.read_text()), "/version")
    return tuple(int(re.search(rf'"{name}": "(\d+)', text)[1]) for name in ("major", "minor"))


class Kubelet(threading.Thread):
    """Pods run and are ready as soon as they are seen, unless `ends` says how they end."""

    def __init__(self, client, pod_class) -> None:
        super().__init__(daemon=True)
        self.client, self.pod_class = client, pod_class
        self.ends: dict[str, int] = {}  # exit code by name
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.2):
            with contextlib.suppress(Exception):
                for pod in self.client.list(self.pod_class, namespace="*"):
                    self._see_to(pod)

    def _see_to(self, pod) -> None:
        name, code = pod.metadata.name, self.ends.get(pod.metadata.name)
        if pod.metadata.deletionTimestamp:  # its grace is over
            self.client.delete(
                self.pod_class, name, namespace=pod.metadata.namespace, grace_period=0
            )
            return
        phase = "Running" if code is None else "Succeeded" if code == 0 else "Failed"
        if (pod.get("status") or {}).get("phase") == phase:
            return
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        container = {
            "name": "c",
            "image": "i",
            "imageID": "i",
            "ready": code is None,
            "restartCount": 0,
            "state": state,
        }
        ready = {"type": "Ready", "status": "True" if code is None else "False"}
        status = {"phase": phase, "conditions": [ready], "containerStatuses": [container]}
        self.client.patch(
            self.pod_class.Status, name, {"status": status}, namespace=pod.metadata.namespace
        )
