import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np

from cairn.labs.exercises.grading import Attempt, NotHere, case, close, equal, require

POLLS = 3  # until a write of the made-up agent has completed


class MadeUp:
    """An agent with NIXL's calls: a write moves nothing until it was polled, as a NIC's does."""

    def __init__(
        self, ends: str = "DONE", notes: list[dict[str, list[bytes]]] | None = None
    ) -> None:
        self.ends, self.notes = ends, list(notes or [])
        self.left = self.open = 0
        self.moved = False
        self.sent: list[bytes] = []
        self.way = ""

    def get_xfer_descs(self, places: list[tuple[int, int, int]], kind: str) -> object:
        return (kind, list(places))

    def initialize_xfer(self, way, local, remote, peer, note=b"") -> object:
        self.open, self.left, self.way = self.open + 1, POLLS, way
        self.sent.append(note)
        return object()

    def transfer(self, handle) -> str:
        return "PROC"

    def check_xfer_state(self, handle) -> str:
        self.left -= 1
        self.moved = self.left <= 0
        return self.ends if self.moved else "PROC"

    def release_xfer_handle(self, handle) -> None:
        self.open -= 1

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return self.notes.pop(0) if self.notes else {}


@case("a region is an address, a length and host memory", "region 由地址、长度和主机内存组成")
def regions(attempt: Attempt) -> None:
    equal(attempt.region(MadeUp(), 4096, 64), ("DRAM", [(4096, 64, 0)]))


@case("put writes, and returns when the write has completed", "put 执行写，并在完成后才返回")
def completes(attempt: Attempt) -> None:
    agent = MadeUp()
    attempt.put(agent, "mine", "theirs", "b", b"note")
    equal(agent.way, "WRITE")
    equal(agent.sent, [b"note"])
    require(agent.moved, "it returned while the write was under way", "写还在进行就返回了")
    equal(agent.open, 0)


@case("a write that failed is an error, and its handle is released", "失败的写是错误，句柄也要释放")
def fails(attempt: Attempt) -> None:
    agent = MadeUp(ends="ERR")
    try:
        attempt.put(agent, "mine", "theirs", "b", b"")
    except ConnectionError:
        require(agent.open == 0, "the handle was not released", "句柄没有释放")
        return
    require(False, "it must raise ConnectionError", "应抛出 ConnectionError")


@case("a note of another peer is kept for who waits for it", "别人的通知要留给等它的人")
def kept(attempt: Attempt) -> None:
    box = attempt.Mailbox(MadeUp(notes=[{}, {"c": [b"one"], "b": [b"two", b"three"]}]))
    for peer, note in (("b", b"three"), ("c", b"one"), ("b", b"two")):
        box.wait(peer, note, 0.3)


@case("a note is handed out once, and waiting ends", "每条通知只给一次，等待有期限")
def once(attempt: Attempt) -> None:
    box = attempt.Mailbox(MadeUp(notes=[{"b": [b"one"]}]))
    box.wait("b", b"one", 1.0)
    try:
        box.wait("b", b"one", 0.05)
    except TimeoutError:
        return
    require(False, "the same note came twice", "同一条通知给了两次")


class Clock:
    """Stands in for `time` in the learner's module: moves only when a write is posted."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = time = perf_counter


@case("the first round is not timed, and a round has two messages", "第一轮不计时；一轮有两条消息")
def timing(attempt: Attempt) -> None:
    clock, rounds = Clock(), 4

    class Answering(MadeUp):
        def transfer(self, handle) -> str:
            clock.now += 0.5 if len(self.sent) == 1 else 0.02  # the first one makes connections
            self.notes.append({"b": [self.sent[-1].replace(b"ping", b"pong")]})
            return "DONE"

    agent, real = Answering(), attempt.time
    attempt.time = clock
    try:
        took = attempt.one_way_s(agent, attempt.Mailbox(agent), "mine", "theirs", "b", rounds)
    finally:
        attempt.time = real
    equal(len(agent.sent), rounds + 1)
    close(took, 0.01, 1e-6)


@contextlib.contextmanager
def pair(transport: str):
    """Two agents over UCX with one region each; `transport` is what UCX may use: "all" leaves it the choice."""
    from cairn.comm.transfer.nixl import load_api

    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = transport
    try:
        api, ends = load_api(), []
        for name in ("a", "b"):
            agent = api.nixl_agent(f"{name}-{transport}", api.nixl_agent_config(backends=["UCX"]))
            memory = np.zeros(4096, np.uint8)
            held = agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
            ends.append((agent, memory, held))
        (a, _, _), (b, _, _) = ends
        a.add_remote_agent(b.get_agent_metadata())
        b.add_remote_agent(a.get_agent_metadata())
        yield ends
        for agent, _, held in ends:
            agent.deregister_memory(held)
    finally:
        if before is None:
            del os.environ["UCX_TLS"]
        else:
            os.environ["UCX_TLS"] = before


def ping_pong(attempt: Attempt, transport: str, rounds: int = 5) -> None:
    """Their side answers every ping by a raw write; bytes and time are looked at."""
    for cheaper in (regions, completes, fails, kept, once, timing):
        cheaper(attempt)  # a real agent waits long for an answer that never comes
    with pair(transport) as ((a, mine, _), (b, theirs, _)):
        mine[:] = 7
        places = [(memory.ctypes.data, memory.nbytes) for memory in (mine, theirs)]
        answered: list[bytes] = []
        ended = threading.Event()

        def answer() -> None:
            local, remote = (b.get_xfer_descs([(*place, 0)], "DRAM") for place in places[::-1])
            while len(answered) < rounds + 1 and not ended.is_set():
                for note in b.get_new_notifs().get(a.name, []):
                    pong = note.replace(b"ping", b"pong")
                    handle = b.initialize_xfer("WRITE", local, remote, a.name, pong)
                    state = b.transfer(handle)
                    while state == "PROC":
                        state = b.check_xfer_state(handle)
                    b.release_xfer_handle(handle)
                    answered.append(note)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        began = time.perf_counter()
        try:
            local, remote = (attempt.region(a, *place) for place in places)
            took = attempt.one_way_s(a, attempt.Mailbox(a), local, remote, b.name, rounds)
            whole = time.perf_counter() - began
        finally:
            ended.set()
            thread.join()
    equal(answered, [b"ping-%d" % number for number in range(rounds + 1)])
    require((theirs == 7).all(), "the bytes did not arrive", "字节没有到达")
    require(
        0 < took * 2 * rounds < whole,
        f"{took:.3g} s a message, {whole:.3g} s for all of {2 * rounds}",
        f"每条 {took:.3g} 秒，而 {2 * rounds} 条共 {whole:.3g} 秒",
    )


@case(
    "bytes and notes go through UCX, on the way that it chooses",
    "经 UCX 传输字节与通知，路径由它选择",
)
def chosen(attempt: Attempt) -> None:
    ping_pong(attempt, "all")


@case("the same program over TCP", "同一程序走 TCP")
def tcp(attempt: Attempt) -> None:
    ping_pong(attempt, "tcp,self")


@case("the same program over RDMA verbs", "同一程序走 RDMA verbs")
def verbs(attempt: Attempt) -> None:
    if not any(Path("/sys/class/infiniband").glob("*")):
        raise NotHere(
            "not looked at: there is no RDMA device here; where the kernel has soft-RoCE, "
            "`modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0` makes one of an interface",
            "未检查：本机没有 RDMA 设备；内核带 soft-RoCE 时，"
            "`modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0` 可在网卡上创建一个",
        )
    ping_pong(attempt, "rc_verbs,ud_verbs,self")
