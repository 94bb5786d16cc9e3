"""An end of a transport on a machine that is short of descriptors, or has many of them."""

import errno
import os
import resource
import socket

import pytest
from transfer_ends import closing, make_end

from cairn.comm.transfer.errors import TransferError
from cairn.comm.transfer.wire import ConnectionGone, Wire


def test_a_machine_without_a_free_descriptor_for_a_while_is_reached_again_afterwards(monkeypatch):
    busy, accept = [True, True], socket.socket.accept

    def starved(self):
        connection = accept(self)
        if busy:
            busy.pop()
            connection[0].close()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return connection

    monkeypatch.setattr(socket.socket, "accept", starved)
    one, other = make_end("tcp", "one"), make_end("tcp", "other")
    with closing(one, other):
        one.listen()
        address = other.listen()
        for _ in range(20):
            try:
                assert one.connect(address) == "other"
                break
            except TransferError:  # the other side was busy
                continue
        assert "other" in one.peers


def test_what_has_arrived_is_seen_on_a_high_descriptor():
    """A server with many connections has numbers that select() does not know."""
    high = 1500
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= high:
        pytest.skip("no such descriptor is allowed here")
    near, far = socket.socketpair()
    with near, far, socket.socket(fileno=os.dup2(near.fileno(), high)) as moved:
        wire = Wire(moved)
        assert not wire.readable()
        far.send(b"x")
        assert wire.readable()


def test_of_two_connections_between_the_same_ends_the_second_leaves_nothing():
    one, other = make_end("shm", "one"), make_end("shm", "other")
    for end in (one, other):
        end.allocate("kv", 4096)
    with closing(one, other):
        one.listen()
        address = other.listen()
        one.connect(address)
        first = one.peers["other"]
        # As when both have called each other: the check before the greeting saw nobody.
        one.peers = type("Late", (dict,), {"__contains__": lambda self, name: False})(one.peers)
        with pytest.raises(ConnectionGone, match="already a connection"):
            one._introduce(_called(other, address))
        assert list(one.mover._theirs) == [first]


def _called(other, address):
    """A second connection to an end, which lets it in, too."""
    other.peers = type("Late", (dict,), {"__contains__": lambda self, name: False})(other.peers)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("\0" + address.partition(":")[2])
    return connection
