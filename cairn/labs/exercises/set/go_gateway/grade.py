import contextlib
import http.client
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cairn.labs.exercises.grading import Attempt, case, equal, require

PATIENCE_S = 20.0
BUILT: dict[Path, Path] = {}


def program(file: Path) -> Path:
    if file not in BUILT:
        go = shutil.which("go")
        require(go, "Go is not on the PATH", "PATH 中没有 Go")
        binary = file.with_suffix("")
        environment = {**os.environ, "GOTOOLCHAIN": "local", "GOFLAGS": "-buildvcs=false"}
        environment.setdefault("GOCACHE", str(Path.home() / ".cache" / "go-build"))
        command = [str(go), "build", "-o", str(binary), file.name]
        process = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=file.parent
        )
        errors = process.stderr[:400]
        require(process.returncode == 0, f"it does not compile: {errors}", f"无法编译：{errors}")
        BUILT[file] = binary
    return BUILT[file]


class Replica(ThreadingHTTPServer):
    """Answers with its name; /hold waits until `go_on`, /stream sends a piece, waits, and sends another."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name, self.go_on, self.held = name, threading.Event(), threading.Semaphore(0)
        self.seen: list[tuple[str, bytes, str | None]] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def stop(self) -> None:
        self.go_on.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Replica

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.seen.append((self.path, body, self.headers.get("x-mine")))
        if self.path == "/hold":
            self.server.held.release()
            self.server.go_on.wait(PATIENCE_S)
        if self.path == "/stream":
            self._stream()
            return
        answer = self.server.name.encode()
        self.send_response(418 if self.path == "/teapot" else 200)
        self.send_header("content-length", str(len(answer)))
        self.send_header("x-name", self.server.name)
        self.end_headers()
        self.wfile.write(answer)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\r\nfirst\r\n")
        self.wfile.flush()
        self.server.go_on.wait(PATIENCE_S)
        self.wfile.write(b"4\r\nlast\r\n0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def gateway(file: Path, urls: list[str], limit: int = 16) -> Iterator[str]:
    command = [str(program(file)), "-replicas", ",".join(urls), "-limit", str(limit)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        require(address, "it printed no address", "没有打印地址")
        yield address
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def replicas(*names: str) -> Iterator[list[Replica]]:
    made = [Replica(name) for name in names]
    try:
        yield made
    finally:
        for one in made:
            one.stop()


def post(address: str, path: str, timeout_s: float = PATIENCE_S) -> http.client.HTTPResponse:
    link = http.client.HTTPConnection(address, timeout=timeout_s)
    link.request("POST", path, b"a prompt", {"x-mine": "yes"})
    return link.getresponse()


def ask(address: str, path: str = "/") -> tuple[int, str]:
    with post(address, path) as answer:
        return answer.status, answer.read().decode()


@case(
    "it compiles; path, body, headers and status pass through",
    "能编译；路径、正文、头和状态码原样传递",
)
def passes(attempt: Attempt) -> None:
    with replicas("a") as (a,), gateway(attempt, [a.url]) as address:
        with post(address, "/teapot?x=1") as answer:
            equal((answer.status, answer.read(), answer.getheader("x-name")), (200, b"a", "a"))
        equal(ask(address, "/teapot"), (418, "a"))
        equal(a.seen[0], ("/teapot?x=1", b"a prompt", "yes"))


@case("the least loaded replica answers", "由负载最小的副本应答")
def least_loaded(attempt: Attempt) -> None:
    with replicas("a", "b") as (a, b), gateway(attempt, [a.url, b.url]) as address:
        holding = threading.Thread(target=ask, args=(address, "/hold"))
        holding.start()
        try:
            require(
                a.held.acquire(timeout=PATIENCE_S), "the first went elsewhere", "首个请求去向不对"
            )
            equal([ask(address)[1] for _ in range(3)], ["b"] * 3)
        finally:
            a.go_on.set()
            b.go_on.set()
            holding.join()
        equal(ask(address)[1], "a")  # it is free again


@case("a stream passes piece by piece", "流式内容逐段传递")
def streams(attempt: Attempt) -> None:
    with replicas("a") as (a,), gateway(attempt, [a.url]) as address:
        try:
            with post(address, "/stream", timeout_s=3.0) as answer:
                equal(answer.read(5), b"first")
                a.go_on.set()
                equal(answer.read(), b"last")
        except TimeoutError:
            require(
                False,
                "the first piece did not come before the last was there",
                "最后一段到来之前没有收到第一段",
            )


@case(
    "above the limit 429 with Retry-After, and room again afterwards",
    "超限返回 429 与 Retry-After，之后恢复",
)
def limited(attempt: Attempt) -> None:
    with replicas("a") as (a,), gateway(attempt, [a.url], limit=2) as address:
        threads = [threading.Thread(target=ask, args=(address, "/hold")) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in threads:
                require(a.held.acquire(timeout=PATIENCE_S), "a request was refused", "请求被拒绝")
            with post(address, "/") as answer:
                equal((answer.status, bool(answer.getheader("retry-after"))), (429, True))
        finally:
            a.go_on.set()
            for thread in threads:
                thread.join()
        equal([ask(address)[0] for _ in range(3)], [200] * 3)


@case(
    "a replica that cannot be reached is passed over; none left is 502",
    "跳过连不上的副本；全部失败为 502",
)
def dead(attempt: Attempt) -> None:
    with replicas("gone") as (gone,):
        nobody = gone.url
    with replicas("b") as (b,), gateway(attempt, [nobody, b.url]) as address:
        equal([ask(address) for _ in range(3)], [(200, "b")] * 3)
    with gateway(attempt, [nobody]) as address:
        equal(ask(address)[0], 502)
