"""Pages from the host memory of another server: the same tokens as without, whatever happens to it meanwhile."""

import contextlib
import errno
import select
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_engines import at_rest, greedy, prompt_of, submit, tiny_engine

from cairn.core.errors import ConfigError
from cairn.serve.config import EngineConfig
from cairn.serve.tiers import peer_tier, shared_pages
from cairn.serve.tiers.peer_tier import PeerPages, PeerTier
from cairn.serve.tiers.shared_pages import Listing, ListRequest, SharedPages
from cairn.serve.tiers.slot_table import SlotTable

LONG = prompt_of(70, 3)
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(peer_tier, "PERIOD_S", 0.01)
    monkeypatch.setattr(peer_tier, "AGAIN_S", 0.01)


def until(true) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.005)


def sharing_engine():
    engine = tiny_engine("qwen3", pages=9, host="64MiB", kv={"kv_offload_share": "127.0.0.1:0"})
    (request,) = submit(engine, [[*LONG, 1]])
    engine.run()
    engine.tiers.settle()
    assert request.outputs == greedy("qwen3", [*LONG, 1])
    return engine


def fetching_engine(address: str):
    return tiny_engine("qwen3", pages=9, host="64MiB", kv={"kv_offload_peers": address})


def answer(engine):
    (request,) = submit(engine, [[*LONG, 4, 5]])
    engine.run()
    assert request.outputs == greedy("qwen3", [*LONG, 4, 5])
    at_rest(engine)
    return request


class Cut:
    """Between two servers: passes bytes on until so many have come from the one that shares."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self.left, self._where = 1 << 40, (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._pass, args=(link,)))
                self._threads[-1].start()

    def _pass(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError), link, socket.create_connection(self._where) as other:
            while True:
                for source in select.select([link, other], [], [])[0]:
                    data = source.recv(1 << 16)
                    if source is other:
                        data = data[: max(self.left, 0)]
                        self.left -= len(data)
                    (other if source is link else link).sendall(data)
                    if not data or self.left <= 0:
                        return


def test_a_prefix_comes_from_the_host_memory_of_another_server():
    first = sharing_engine()
    second = fetching_engine(first.tiers.shared.address)
    until(lambda: len(second.tiers.disk) >= 4)
    request = answer(second)
    assert (request.cached, request.ledger.disk_tokens) == (64, 64)
    assert second.tiers.counts.failed_loads == 0
    first.tiers.clear()  # what has left there is not asked for any more
    until(lambda: not len(second.tiers.disk))
    for engine in (second, first):
        engine.tiers.close()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.999])
def test_a_server_that_dies_in_the_middle_costs_time_and_no_token(share):
    first = sharing_engine()
    cut = Cut(first.tiers.shared.address)
    second = fetching_engine(cut.address)
    until(lambda: len(second.tiers.disk) >= 4)
    cut.left = int(share * 4 * second.tiers.copies.page_bytes)
    assert answer(second).ledger.disk_tokens == 0
    assert second.tiers.counts.failed_loads <= 1  # none: the end of its listing was seen before
    for one in (second.tiers, first.tiers, cut):
        one.close()


@pytest.mark.parametrize("came", [None, b"damaged"])
def test_a_page_that_is_listed_and_does_not_come_is_computed(came, monkeypatch):
    first = sharing_engine()
    second = fetching_engine(first.tiers.shared.address)
    until(lambda: len(second.tiers.disk) >= 4)
    page = came and came.ljust(second.tiers.copies.page_bytes)
    monkeypatch.setattr(first.tiers.shared, "page", lambda key: page)
    if came:
        monkeypatch.setattr(peer_tier, "zlib", SimpleNamespace(crc32=lambda data: -1))
    assert answer(second).ledger.disk_tokens == 0
    assert second.tiers.counts.failed_loads == 1
    for engine in (second, first):
        engine.tiers.close()


def test_another_model_and_wrong_options_are_refused():
    first = sharing_engine()
    host, port = first.tiers.shared.address.split(":")
    other = PeerPages(host, int(port), "another", first.tiers.copies.page_bytes)
    until(lambda: other.refused)
    assert not other.keys
    other.close()
    first.tiers.close()
    for given, said in [
        ({"kv_offload_share": "127.0.0.1:0"}, "kv_offload_host"),
        ({"kv_offload_host": "1", "kv_offload_peers": "x", "kv_offload_disk": "/x:1"}, "_disk"),
    ]:
        with pytest.raises(ConfigError, match=said):
            EngineConfig(model="m", **given)
    for given in ({"kv_offload_peers": "somewhere"}, {"kv_offload_share": "0.0.0.0:0"}):
        with pytest.raises(ConfigError, match=r"HOST:PORT|secret"):
            tiny_engine("qwen3", host="64MiB", kv=given)


def test_a_page_whose_slot_is_given_away_while_it_is_copied_is_not_there():
    book = SlotTable(1)
    slot = book.put(b"a", b"", 1.0)
    book.ready(b"a")

    class Overtaken(np.ndarray):
        def __getitem__(self, at):
            book.drop(b"a")
            book.put(b"b", b"", 1.0)
            plain_SB = np.asarray(self)
            plain_SB[:] = 7  # another page
            return plain_SB[at]

    shared = SharedPages(book, np.zeros((1, 8), np.uint8), "m")
    shared.offer(b"a")
    assert shared.page(b"a") == bytes(8)
    shared._memory_SB = np.zeros((1, 8), np.uint8).view(Overtaken)
    assert slot == 0
    assert shared.page(b"a") is None
    assert shared.present() == {}
    shared.close()


def small_share(pages: int = 2) -> SharedPages:
    book, memory_SB = SlotTable(pages), np.arange(8 * pages, dtype=np.uint8).reshape(pages, 8)
    shared = SharedPages(book, memory_SB, "m")
    for number in range(pages):
        book.put(bytes([number]), b"", 1.0)
        book.ready(bytes([number]))
        shared.offer(bytes([number]))
    return shared


def small_tier(shared: SharedPages) -> PeerTier:
    host, port = shared.address.split(":")
    return PeerTier([PeerPages(host, int(port), "m", 8)])


def test_a_connection_that_was_closed_for_being_idle_costs_no_page():
    shared = small_share()
    tier = small_tier(shared)
    (peer,) = tier.peers
    until(lambda: len(tier) == 2)
    until(lambda: peer._idle)
    (mine,) = peer._idle
    port = mine.getsockname()[1]
    for link in list(shared._open.values()):
        if link.getpeername()[1] == port:
            link.shutdown(socket.SHUT_RDWR)
    select.select([mine], [], [], PATIENCE_S)
    read = tier.read([b"\0"], [np.zeros(8, np.uint8)]).result(PATIENCE_S)
    assert (read.damaged, read.unread) == ([], [])
    tier.close()
    shared.close()


def test_a_page_is_read_or_said_to_be_missing_while_the_listing_changes():
    class Changing(dict):
        """Knows a page from the second question on."""

        def __contains__(self, key) -> bool:
            known = dict.__contains__(self, key)
            self[key] = None
            return known

    peer = SimpleNamespace(keys=Changing({b"b": None}), page_bytes=8, rate=1.0, close=lambda: None)
    peer.read = lambda keys, into: []
    tier = PeerTier([peer])
    read = tier.read([b"a", b"b"], [np.zeros(8, np.uint8)] * 2).result(PATIENCE_S)
    assert read.unread == [b"a"]
    tier.close()


def test_pages_that_have_left_are_forgotten_though_nobody_asks():
    shared = small_share(pages=2)
    for number in range(2, 50):
        key = bytes([number])
        shared._book.put(key, b"", 1.0)
        shared._book.ready(key)
        shared.offer(key)
    assert len(shared._pages) <= 4
    shared.close()


def test_a_listing_that_is_too_long_for_a_message_comes_in_portions(monkeypatch):
    monkeypatch.setattr(shared_pages, "MOST_ASKED", 200)  # bytes: 20 pages take more
    monkeypatch.setattr(shared_pages, "MOST_LISTED", 7)
    monkeypatch.setattr(peer_tier, "PERIOD_S", 2 * PATIENCE_S)  # the next portion is not waited for
    shared = small_share(pages=20)
    tier = small_tier(shared)
    until(lambda: len(tier) == 20)
    assert tier.peers[0].refused == ""
    tier.peers[0]._stopped.set()
    tier.close()
    asked, told = ListRequest("m", 8), {bytes([number]) for number in range(20)}
    for number in range(3, 20):
        shared._book.drop(bytes([number]))
    portions = [shared._listing(asked, told) for _ in range(3)]
    assert [(len(one.removed), one.more) for one in portions] == [(7, True), (7, True), (3, False)]
    assert told == {b"\0", b"\1", b"\2"}
    shared.close()


def test_a_full_portion_fits_into_a_message():
    digest = bytes(33)  # a group and a digest
    stored = [(digest, digest, 0.125)] * shared_pages.MOST_LISTED
    listing = Listing(stored, [digest] * shared_pages.MOST_LISTED, more=True)
    assert len(shared_pages.encode(listing)) < shared_pages.MOST_ASKED / 4


def test_a_process_that_had_no_room_for_a_connection_shares_on(monkeypatch):
    refusals = [OSError(errno.EMFILE, "too many open files")]

    class Full(socket.socket):
        def accept(self):
            if refusals:
                raise refusals.pop()
            return super().accept()

    bound = shared_pages.bound
    monkeypatch.setattr(shared_pages, "FULL_S", 0.0)
    monkeypatch.setattr(shared_pages, "bound", lambda *given: Full(fileno=bound(*given).detach()))
    shared = small_share()
    tier = small_tier(shared)
    until(lambda: len(tier) == 2)
    tier.close()
    shared.close()


PAGES, PAGE_BYTES = 64, 1 << 16


SHARE = f"""
import sys
import numpy as np
from cairn.serve.tiers.shared_pages import SharedPages
from cairn.serve.tiers.slot_table import SlotTable

book, memory_SB = SlotTable({PAGES}), np.zeros(({PAGES}, {PAGE_BYTES}), np.uint8)
shared = SharedPages(book, memory_SB, "m")
for number in range({PAGES}):
    memory_SB[book.put(bytes([number]), b"", 1.0)] = number
    book.ready(bytes([number]))
    shared.offer(bytes([number]))
print(shared.address, flush=True)
sys.stdin.read()
"""


def test_pages_of_a_process_that_is_killed_are_whole_or_not_there():
    command, pipe = [sys.executable, "-c", SHARE], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    host, port = process.stdout.readline().split(":")
    tier = PeerTier([PeerPages(host, int(port), "m", PAGE_BYTES)])
    until(lambda: len(tier) == PAGES)
    keys = [bytes([number]) for number in range(PAGES)]
    came = 0
    for turn in range(1000):
        if turn == 2:
            process.kill()
        into = [np.zeros(PAGE_BYTES, np.uint8) for _ in keys]
        read = tier.read(keys, into).result(PATIENCE_S)
        whole = [at for at, key in enumerate(keys) if key not in (*read.damaged, *read.unread)]
        assert all((into[at] == at).all() for at in whole)
        came += len(whole)
        if not whole:
            break
    assert came >= 2 * PAGES
    until(lambda: not len(tier))
    process.communicate()
    tier.close()
