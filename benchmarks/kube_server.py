"""etcd and an API server of Kubernetes on loopback, each of which can be killed, stopped and started again.

There is no kubelet, no scheduler and no controller: whoever uses it writes the status of what controllers would see to.
`kube-apiserver` is that of the folder which CAIRN_KUBE_ASSETS names, `etcd` that of the PATH.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from cairn.core.errors import UsageError

READY_S = float(os.environ.get("CAIRN_KUBE_START_S", "60"))
CONFIG = """apiVersion: v1
kind: Config
clusters: [{{name: here, cluster: {{server: "{url}", insecure-skip-tls-verify: true}}}}]
users: [{{name: admin, user: {{token: "{token}"}}}}]
contexts: [{{name: here, context: {{cluster: here, user: admin}}}}]
current-context: here
"""


class ControlPlane:
    def __init__(self, folder: Path) -> None:
        self._assets = Path(os.environ.get("CAIRN_KUBE_ASSETS", ""))
        if not (self._assets / "kube-apiserver").is_file() or not shutil.which("etcd"):
            raise UsageError(
                "needs kube-apiserver and etcd",
                hint="CAIRN_KUBE_ASSETS=FOLDER with kube-apiserver in it; apt-get install etcd-server",
            )
        self._folder, self.token = folder, secrets.token_hex(16)
        self._client, self._peer, port = _free_ports(3)
        self.url = f"https://127.0.0.1:{port}"
        self._port = str(port)
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(CONFIG.format(url=self.url, token=self.token))
        (folder / "tokens.csv").write_text(f"{self.token},admin,admin,system:masters\n")
        key = ["openssl", "genrsa", "-out", str(folder / "sa.key"), "2048"]
        subprocess.run(key, check=True, capture_output=True)
        self.etcd = self._start("etcd", self._etcd_command())
        self.start_api()

    def start_api(self) -> None:
        """Ready when it returns."""
        self.api = self._start("kube-apiserver", self._api_command())
        until = time.monotonic() + READY_S
        while time.monotonic() < until and self.api.poll() is None:
            with contextlib.suppress(OSError):
                if self.get("/readyz") == "ok":
                    return
            time.sleep(0.1)
        log = (self._folder / "kube-apiserver.log").read_text()
        raise RuntimeError(f"the API server is not ready: {log[-2000:]}")

    def kill_api(self) -> None:
        self.api.kill()
        self.api.wait()

    @contextlib.contextmanager
    def stopped_etcd(self) -> Iterator[None]:
        """etcd takes requests and does not answer."""
        self.etcd.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.etcd.send_signal(signal.SIGCONT)

    def get(self, path: str) -> str:
        request = urllib.request.Request(
            self.url + path, headers={"Authorization": f"Bearer {self.token}"}
        )
        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        with urllib.request.urlopen(request, timeout=READY_S, context=unchecked) as answer:
            return answer.read().decode()

    def close(self) -> None:
        for process in (self.api, self.etcd):
            process.kill()
            process.wait()

    def _start(self, name: str, command: list[str]) -> "subprocess.Popen[bytes]":
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)

    def _etcd_command(self) -> list[str]:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._client, self._peer))
        return ["etcd", "--data-dir", "etcd", "--unsafe-no-fsync",
                "--listen-client-urls", client, "--advertise-client-urls", client,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                "--initial-cluster", f"default={peer}"]  # fmt: skip

    def _api_command(self) -> list[str]:
        return [str(self._assets / "kube-apiserver"),
                "--etcd-servers", f"http://127.0.0.1:{self._client}",
                "--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1",
                "--secure-port", self._port, "--cert-dir", "certs",
                "--service-cluster-ip-range", "10.0.0.0/16",
                "--service-account-key-file", "sa.key", "--service-account-signing-key-file", "sa.key",
                "--service-account-issuer", "https://kubernetes.default.svc",
                "--token-auth-file", "tokens.csv", "--authorization-mode", "RBAC",
                "--disable-admission-plugins", "ServiceAccount",
                "--endpoint-reconciler-type", "none"]  # fmt: skip


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
