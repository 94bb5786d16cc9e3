"""Authenticates the clients of a listening socket: one without the secret is refused with the reason, and counted.

    accept --> a thread for each --> admits? --yes--> the service          no: closed, an event, one more in `refused`

A connection that sends nothing blocks its own thread and no other. At most `WAITING` of them are kept; a further one
closes the oldest, so that a legitimate client always gets in. The handshake itself is in `shared_secret`.
"""

import contextlib
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable

from cairn.core.events import instant
from cairn.core.shared_secret import AuthenticationRefused, Secret, admit

PATIENCE_S = 30.0  # a caller on a busy machine may be slow
WAITING = 64  # connections that have not said yet who they are


class ClientAuthenticator:
    def __init__(
        self,
        secret: Secret | None,
        service: str,
        log_line: Callable[[str], None] = lambda text: None,
        patience_s: float = PATIENCE_S,
        waiting: int = WAITING,
    ) -> None:
        """`service`: what the socket is for, in events. `log_line` gets a line for each client that is refused."""
        self.secret, self.service, self.log_line = secret, service, log_line
        self.patience_s, self.most = patience_s, waiting
        self.refused: Counter[str] = Counter()  # connections, by reason
        self._waiting: OrderedDict[int, socket.socket] = OrderedDict()
        self._lock = threading.Lock()

    def admits(self, connection: socket.socket) -> bool:
        """Called by a thread of the connection's own; False: it is closed."""
        self._keep_waiting(connection)
        try:
            admit(connection, self.secret, self.patience_s)
        except OSError as error:
            connection.close()
            self._note(
                str(error)
                if isinstance(error, AuthenticationRefused)
                else "it did not say who it is"
            )
            return False
        finally:
            with self._lock:
                self._waiting.pop(id(connection), None)
        return True

    def _keep_waiting(self, connection: socket.socket) -> None:
        with self._lock:
            self._waiting[id(connection)] = connection
            full = len(self._waiting) > self.most
            oldest = self._waiting.popitem(last=False)[1] if full else None
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # which wakes its thread

    def _note(self, why: str) -> None:
        with self._lock:
            self.refused[why] += 1
            count = self.refused.total()
        instant("connection refused", door=self.service, why=why, count=count)
        self.log_line(f"{self.service}: a connection was refused: {why} ({count} so far)")
