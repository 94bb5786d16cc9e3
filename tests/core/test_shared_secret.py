"""A secret that both ends share: who knows it gets in, everybody else is told why, and nobody blocks anybody."""

import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cairn.core import events
from cairn.core.client_authenticator import ClientAuthenticator
from cairn.core.errors import ConfigError
from cairn.core.records import Instant, read
from cairn.core.shared_secret import (
    MAGIC,
    NONCE,
    PROOF,
    Secret,
    admit,
    check_open,
    enter,
    is_loopback,
    secret_from,
)

OURS, THEIRS = Secret(b"a secret of this job"), Secret(b"a secret of that job")
PATIENCE_S = 60.0


def outcome(part, link, secret):
    try:
        part(link, secret, PATIENCE_S)
    except OSError as error:
        link.close()
        return f"{type(error).__name__}: {error}"
    return "in"


def met(listener, caller):
    """How both ends of a connection see it."""
    here, there = socket.socketpair()
    with here, there, ThreadPoolExecutor(1) as threads:
        other = threads.submit(outcome, enter, there, caller)
        return outcome(admit, here, listener), other.result()


def test_who_has_the_secret_gets_in_and_so_does_everybody_where_there_is_none():
    assert met(OURS, Secret(OURS.reveal())) == ("in", "in")
    assert met(None, None) == ("in", "in")


@pytest.mark.parametrize(
    ("listener", "caller", "here", "there"),
    [
        (OURS, THEIRS, "it has another secret", "our secret is not the one it knows"),
        (OURS, None, "it has no secret", "it asks for a secret, and we have none"),
        (None, OURS, "it has a secret, and there is none here", "it asks for no secret"),
    ],
)
def test_others_are_refused_and_both_sides_say_why(listener, caller, here, there):
    seen_here, seen_there = met(listener, caller)
    assert seen_here == f"AuthenticationRefused: {here}"
    assert seen_there.startswith(f"AuthenticationRefused: {there}")


def test_an_answer_that_was_overheard_opens_no_other_connection():
    here, there = socket.socketpair()
    with here, there, ThreadPoolExecutor(1) as threads:
        listening = threads.submit(outcome, admit, here, OURS)
        challenge = exactly(there, len(MAGIC) + 1 + NONCE)
        theirs, mine = challenge[-NONCE:], bytes(NONCE)
        answer = b"\1" + mine + OURS.proof(b"caller", theirs, mine)
        there.sendall(answer)
        assert listening.result() == "in"
    here, there = socket.socketpair()
    with here, there, ThreadPoolExecutor(1) as threads:
        listening = threads.submit(outcome, admit, here, OURS)
        exactly(there, len(MAGIC) + 1 + NONCE)
        there.sendall(answer)
        assert listening.result() == "AuthenticationRefused: it has another secret"


def test_a_listener_that_only_pretends_is_refused():
    """It says that all is fine, sends our own proof back, or is something else altogether."""
    for reply in (bytes(PROOF), None):
        here, there = socket.socketpair()
        with here, there, ThreadPoolExecutor(1) as threads:
            calling = threads.submit(outcome, enter, there, OURS)
            here.sendall(MAGIC + b"\1" + bytes(NONCE))
            said = exactly(here, 1 + NONCE + PROOF)
            here.sendall(b"\0" + (reply or said[-PROOF:]))
            assert (
                calling.result()
                == "AuthenticationRefused: it cannot prove that it knows our secret"
            )
    here, there = socket.socketpair()
    with here, there, ThreadPoolExecutor(1) as threads:
        calling = threads.submit(outcome, enter, there, OURS)
        here.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4)
        assert calling.result() == "AuthenticationRefused: it is something else that listens there"


def test_one_that_says_nothing_or_half_of_it_is_given_up():
    for said in (b"", b"\1" + bytes(NONCE)):
        here, there = socket.socketpair()
        with here, there:
            there.sendall(said)
            with pytest.raises(TimeoutError, match="did not say in time"):
                admit(here, OURS, 0.05)
        here, there = socket.socketpair()
        with here, there, ThreadPoolExecutor(1) as threads:
            listening = threads.submit(outcome, admit, here, OURS)
            exactly(there, len(MAGIC) + 1 + NONCE)
            there.sendall(said)
            there.close()
            assert "closed the connection before it had said who it is" in listening.result()


def test_silent_callers_keep_nobody_waiting_and_the_oldest_makes_room(tmp_path):
    events.listen(tmp_path / "events.jsonl")
    try:
        authenticator = ClientAuthenticator(OURS, "the door", patience_s=PATIENCE_S, waiting=2)
        let_in = {}
        silent = [socket.socketpair() for _ in range(4)]

        def knock(number, connection):
            let_in[number] = authenticator.admits(connection)

        threads = []
        for number, (here, there) in enumerate(silent):
            threads.append(threading.Thread(target=knock, args=(number, here)))
            threads[-1].start()
            exactly(there, len(MAGIC) + 1 + NONCE)  # it is waited for from now on
        for thread in threads[:2]:
            thread.join()
        assert let_in == {0: False, 1: False}  # two may wait: the oldest had to go
        here, there = socket.socketpair()
        with here, there, ThreadPoolExecutor(1) as pool:
            calling = pool.submit(outcome, enter, there, OURS)
            assert authenticator.admits(here)
            assert calling.result() == "in"
        for _, there in silent:
            there.close()
        for thread in threads:
            thread.join()
        assert let_in == dict.fromkeys(range(4), False)
        assert authenticator.refused == {"it did not say who it is": 4}
    finally:
        events.close()
    told = [r for r in read(tmp_path / "events.jsonl") if isinstance(r, Instant)]
    assert {record.name for record in told} == {"connection refused"}
    assert sorted(record.fields["count"] for record in told) == [1, 2, 3, 4]


def test_no_log_shows_a_secret():
    assert "secret of this" not in repr(OURS) + str(OURS) + f"{(OURS,)}"
    assert pickle.loads(pickle.dumps(OURS)) == OURS
    assert Secret.fresh() != Secret.fresh()


def test_a_secret_comes_from_the_environment_and_a_short_one_is_refused():
    assert secret_from({}) is None
    assert secret_from({"CAIRN_JOB_SECRET": " sixteen letters! "}) == Secret(b"sixteen letters!")
    with pytest.raises(ConfigError, match="has 5 characters, at least 16") as raised:
        secret_from({"CAIRN_JOB_SECRET": "abcde"})
    assert "abcde" not in str(raised.value)


def test_off_loopback_a_door_without_a_secret_is_refused():
    assert [
        host for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost") if not is_loopback(host)
    ] == []
    for host in ("10.0.0.1", "0.0.0.0", "node-7", "::"):
        check_open(host, OURS, "it")
        with pytest.raises(ConfigError, match="without a secret"):
            check_open(host, None, "it")


def exactly(link, count):
    got = b""
    while len(got) < count:
        got += link.recv(count - len(got))
    return got
