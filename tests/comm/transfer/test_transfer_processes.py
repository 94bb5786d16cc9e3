"""Two real processes: a hand-over, and what happens to the other one when one is killed or frozen."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from transfer_child import CONTENTS, LENGTH, OTHER, TARGET, receiver, sender
from transfer_ends import KINDS, closing, make_end, wait_for
from transfer_oracle import store, whole_cache

from cairn.comm.transfer.choose_transport import make_transport
from cairn.comm.transfer.errors import TransferError
from cairn.comm.transfer.handover_messages import Offer
from cairn.comm.transfer.handshake import Side, say_hello
from cairn.comm.transfer.mover import Patience
from cairn.comm.transfer.page_receiver import NotReceived, Received
from cairn.comm.transfer.tcp import tcp
from cairn.comm.transfer.transport import PeerGone, PeerJoined
from cairn.core.errors import ConfigError
from cairn.core.shared_secret import Secret

CHILD = Path(__file__).parents[2] / "transfer_child.py"
SOON = 60.0  # the most a loaded machine may take; nothing here waits for it to pass


@contextmanager
def child(kind: str, role: str) -> Iterator[subprocess.Popen[str]]:
    make_end(kind, "probe").close()  # skips here, where a reason can be given
    process = subprocess.Popen(
        [sys.executable, str(CHILD), kind, role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=CHILD.parents[1],
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def offer_from(process: subprocess.Popen[str]) -> Offer:
    assert process.stdout is not None
    return msgspec.json.decode(process.stdout.readline(), type=Offer)


def steps_until(step) -> list:
    found, deadline = [], time.monotonic() + SOON
    while not found and time.monotonic() < deadline:
        found = step(time.monotonic(), wait_s=0.05)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_hand_over_between_processes(kind):
    with child(kind, "give") as process:
        reader, memory = receiver(kind, offer_from(process))
        with closing(reader.transport):
            expected = np.zeros_like(memory)
            store(TARGET, [expected], OTHER, whole_cache(CONTENTS, LENGTH), (0, LENGTH))
            assert steps_until(reader.step) == [Received("r")]
            assert np.array_equal(memory, expected)
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "released"
            assert process.wait(SOON) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_pages_come_free_when_their_reader_is_killed(kind):
    give, offer, memory = sender(kind, ready=False)
    sockets = []
    with closing(give.transport), child(kind, "take") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(offer).decode() + "\n")
        process.stdin.flush()
        speak = threading.Thread(target=process.stdout.readline)  # `claimed`
        speak.start()
        while speak.is_alive():
            assert give.step(time.monotonic(), wait_s=0.05) == []
        sockets += [peer.wire.socket for peer in give.transport.peers.values()]
        process.kill()
        freed = steps_until(give.step)
        assert [(one.request, one.why) for one in freed] == [("r", "lost")]
        assert not give.owner.held()
        assert not give.transport.peers
    assert [one.fileno() for one in sockets] == [-1]
    assert not [one for one in threading.enumerate() if one.name.startswith("transfer")]
    del give, memory  # shared memory is open for as long as somebody can see it
    gc.collect()
    assert not [link for link in open_files() if "cairn-transfer" in link]


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_reader_is_told_when_the_giver_is_killed(kind):
    with child(kind, "hold") as process:
        reader, memory = receiver(kind, offer_from(process))
        with closing(reader.transport):
            before = memory.copy()
            for _ in range(10):
                assert reader.step(time.monotonic(), wait_s=0.02) == []
            process.kill()
            (outcome,) = steps_until(reader.step)
            assert isinstance(outcome, NotReceived)
            assert "sender is lost" in outcome.reason
            assert np.array_equal(memory, before)


def test_a_frozen_peer_is_lost_by_its_silence():
    with child("tcp", "hold") as process:
        offer = offer_from(process)
        end = tcp("watcher", patience=Patience(beat_s=0.1, silence_s=0.9))
        with closing(end):
            end.listen(say_hello(Side("watcher", 0, TARGET)))
            end.connect(offer.addresses[0])
            os.kill(process.pid, signal.SIGSTOP)
            events = wait_for(end, lambda event: isinstance(event, PeerGone), SOON)
            assert any(
                isinstance(event, PeerGone) and "silent for" in event.reason for event in events
            )
            os.kill(process.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n" * 4, b"CRN1" + b"\xff" * 60, b""],
    ids=["http", "huge", "empty"],
)
def test_a_stranger_on_the_port_does_no_harm(noise):
    import socket

    end, friend = make_end("tcp", "a"), make_end("tcp", "b")
    with closing(end, friend):
        address = end.listen()
        host, port = address.removeprefix("tcp:").split(":")
        # It may be thrown out at any moment.
        with socket.create_connection((host, int(port))) as stranger, contextlib.suppress(OSError):
            stranger.sendall(noise)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1024):
                pass
        friend.listen()
        assert friend.connect(address) == "a"


def test_an_end_talks_to_those_who_know_its_secret_and_to_no_others():
    secret = Secret.fresh()
    end, friend = tcp("a", secret=secret), tcp("b", secret=secret)
    other, nobody = tcp("c", secret=Secret.fresh()), tcp("d")
    with closing(end, friend, other, nobody):
        address = end.listen()
        for one in (friend, other, nobody):
            one.listen()
        with pytest.raises(TransferError, match="our secret is not the one it knows"):
            other.connect(address)
        with pytest.raises(TransferError, match="it asks for a secret, and we have none"):
            nobody.connect(address)
        assert friend.connect(address) == "a"
        joined = wait_for(end, lambda event: isinstance(event, PeerJoined), SOON)
        assert [event.peer for event in joined] == ["b"]
        deadline = time.monotonic() + SOON
        while end.authenticator.refused.total() < 2 and time.monotonic() < deadline:
            time.sleep(0.01)  # they were told before they are counted
        assert end.authenticator.refused == {"it has another secret": 1, "it has no secret": 1}


def test_an_end_that_anybody_could_reach_needs_a_secret(monkeypatch):
    with pytest.raises(ConfigError, match=r"'a' would listen on 0\.0\.0\.0 without a secret"):
        tcp("a", "0.0.0.0").listen()
    monkeypatch.setenv("CAIRN_JOB_SECRET", "one for the whole job")
    assert make_transport("tcp", "a").secret == Secret(b"one for the whole job")


def test_mistakes_in_addresses_are_said():
    end = make_end("tcp", "a")
    with closing(end):
        with pytest.raises(TransferError, match="call listen"):
            end.connect("tcp:127.0.0.1:9")
        address = end.listen()
        port = int(address.rpartition(":")[2])
        with pytest.raises(TransferError, match=r"no connection to tcp:127\.0\.0\.1:9"):
            end.connect("tcp:127.0.0.1:9")
        with pytest.raises(TransferError, match="speaks 'tcp'"):
            end.connect("shm:somewhere")
        other = tcp("b", port=port)
        with closing(other), pytest.raises(TransferError, match="cannot listen on"):
            other.listen()


def open_files() -> list[str]:
    links = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(entry.path))
    return links
