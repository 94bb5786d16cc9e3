"""Mutual authentication of two processes of a job: each proves that it knows the job's secret, without sending it.

    listener                                                       caller
       secret required?, nonce a                          ------>
                                                          <------  has a secret?, nonce b, HMAC("caller", a, b)
       verdict, HMAC("listener", b, a)                    ------>

Both nonces are new for each connection, so a recorded answer opens no other one. The handshake authenticates the
opening of a connection; the bytes that follow are neither encrypted nor signed. Both sides have a deadline, so a
caller that sends nothing costs one thread for a few seconds. Knows sockets and bytes; nothing about what is protected.
"""

import hashlib
import hmac
import ipaddress
import secrets
import socket
import time
from collections.abc import Mapping

from cairn.core.errors import ConfigError

VARIABLE = "CAIRN_JOB_SECRET"
LEAST = 16  # characters of a secret that a person has chosen
PATIENCE_S = 5.0  # for a whole handshake
MAGIC = b"cairn/1\n"
NONCE = PROOF = 32
FINE, WRONG, MISSING, NOT_ASKED = range(4)
TO_LISTENER = {
    WRONG: "it has another secret",
    MISSING: "it has no secret",
    NOT_ASKED: "it has a secret, and there is none here",
}
TO_CALLER = {
    WRONG: "our secret is not the one it knows",
    MISSING: "it asks for a secret, and we have none",
    NOT_ASKED: "it asks for no secret, so it cannot prove that it belongs to our job",
}


class Secret:
    """Bytes that are never printed: neither a log nor a traceback shows them."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    @classmethod
    def fresh(cls) -> "Secret":
        return cls(secrets.token_hex(32).encode())

    def reveal(self) -> bytes:
        """The secret itself, for a file or a store that only the owner of the job can read."""
        return self._value

    def proof(self, role: bytes, first: bytes, second: bytes) -> bytes:
        return hmac.digest(self._value, b"|".join((MAGIC, role, first, second)), hashlib.sha256)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __reduce__(self) -> tuple[type, tuple[bytes]]:
        return Secret, (self._value,)


class AuthenticationRefused(ConnectionError):
    """The other end failed authentication. A connection that breaks during the handshake is another ConnectionError."""


def secret_from(env: Mapping[str, str], variable: str = VARIABLE) -> Secret | None:
    """The secret that a launcher has put into the environment; None: there is none."""
    text = env.get(variable, "").strip()
    if not text:
        return None
    if len(text) < LEAST:
        raise ConfigError(
            f"{variable} has {len(text)} characters, at least {LEAST} are wanted",
            hint='python -c "import secrets; print(secrets.token_hex())" makes a good one',
        )
    return Secret(text.encode())


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine can reach a listener on this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_open(host: str, secret: Secret | None, what: str) -> None:
    """Refuses a listener that the network could reach without a secret."""
    if secret is None and not is_loopback(host):
        raise ConfigError(
            f"{what} would listen on {host} without a secret: anybody who can reach it could use it",
            hint=f"set the same {VARIABLE} on every node, or listen on 127.0.0.1",
        )


def admit(link: socket.socket, secret: Secret | None, patience_s: float = PATIENCE_S) -> None:
    """The listener's part; raises Refused, and tells the caller why. The socket blocks again afterwards."""
    deadline = time.monotonic() + patience_s
    mine = secrets.token_bytes(NONCE)
    _write(link, MAGIC + bytes([secret is not None]) + mine, deadline)
    hello = _read(link, 1 + NONCE + PROOF, deadline)
    has, theirs, proof = hello[0], hello[1 : 1 + NONCE], hello[1 + NONCE :]
    if secret is None:
        verdict = NOT_ASKED if has else FINE
    elif not has:
        verdict = MISSING
    else:
        right = hmac.compare_digest(proof, secret.proof(b"caller", mine, theirs))
        verdict = FINE if right else WRONG
    ours = bytes(PROOF)
    if secret is not None and verdict == FINE:
        ours = secret.proof(b"listener", theirs, mine)
    _write(link, bytes([verdict]) + ours, deadline)
    if verdict != FINE:
        raise AuthenticationRefused(TO_LISTENER[verdict])
    link.settimeout(None)


def enter(link: socket.socket, secret: Secret | None, patience_s: float = PATIENCE_S) -> None:
    """The caller's part; raises Refused, also where the listener cannot prove that it knows the secret."""
    deadline = time.monotonic() + patience_s
    hello = _read(link, len(MAGIC) + 1 + NONCE, deadline)
    if not hello.startswith(MAGIC):
        raise AuthenticationRefused("it is something else that listens there")
    theirs, mine = hello[len(MAGIC) + 1 :], secrets.token_bytes(NONCE)
    proof = bytes(PROOF) if secret is None else secret.proof(b"caller", theirs, mine)
    _write(link, bytes([secret is not None]) + mine + proof, deadline)
    answer = _read(link, 1 + PROOF, deadline)
    if answer[0] != FINE:
        raise AuthenticationRefused(TO_CALLER.get(answer[0], f"it says {answer[0]}"))
    if secret is not None:
        right = secret.proof(b"listener", mine, theirs)
        if not hmac.compare_digest(answer[1:], right):
            raise AuthenticationRefused("it cannot prove that it knows our secret")
    link.settimeout(None)


def _read(link: socket.socket, count: int, deadline: float) -> bytes:
    """So many bytes before the deadline, however slowly they come."""
    received = b""
    while len(received) < count:
        _hurry(link, deadline)
        try:
            part = link.recv(count - len(received))
        except TimeoutError:
            continue  # `_hurry` says it
        if not part:
            raise ConnectionError("it closed the connection before it had said who it is")
        received += part
    return received


def _write(link: socket.socket, data: bytes, deadline: float) -> None:
    _hurry(link, deadline)
    link.sendall(data)


def _hurry(link: socket.socket, deadline: float) -> None:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("it did not say in time who it is")
    link.settimeout(remaining)
