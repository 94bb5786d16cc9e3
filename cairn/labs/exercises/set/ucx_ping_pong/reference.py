"""One-sided ping-pong with NIXL over UCX: two agents write into each other's registered memory.

UCX takes shared memory or TCP here and RDMA where there is a NIC; the program is the same. The words of verbs:
a registered region is a memory region with its keys, `initialize_xfer` and `transfer` post a work request,
`check_xfer_state` polls its completion, a notification is a write with immediate data.
"""

import time
from typing import Any

PENDING, DONE = "PROC", "DONE"


def region(agent: Any, address: int, nbytes: int) -> Any:
    """Descriptors of one stretch of host memory, as `initialize_xfer` takes them."""
    # begin answer
    return agent.get_xfer_descs([(address, nbytes, 0)], "DRAM")
    # end answer


def put(agent: Any, local: Any, remote: Any, peer: str, note: bytes) -> None:
    """Write `local` into the peer's `remote` and tell it `note`.

    Returns when the write has completed; ConnectionError where it failed. The handle is released either way.
    """
    # begin answer
    handle = agent.initialize_xfer("WRITE", local, remote, peer, note)
    try:
        state = agent.transfer(handle)
        while state == PENDING:
            state = agent.check_xfer_state(handle)
    finally:
        agent.release_xfer_handle(handle)
    if state != DONE:
        raise ConnectionError(f"the write to {peer} ended as {state}")
    # end answer


class Mailbox:
    """Received notes, each handed out once. An agent returns every note only once, to whichever caller asks first."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent
        self.kept: list[tuple[str, bytes]] = []

    def wait(self, peer: str, note: bytes, limit_s: float = 5.0) -> None:
        """Returns when `peer` has sent `note`; TimeoutError after `limit_s`. Other notes stay for others."""
        # begin answer
        deadline = time.monotonic() + limit_s
        while (peer, note) not in self.kept:
            for sender, notes in self.agent.get_new_notifs().items():
                self.kept += [(sender, one) for one in notes]
            if time.monotonic() > deadline and (peer, note) not in self.kept:
                raise TimeoutError(f"{peer} has not sent {note!r}")
        self.kept.remove((peer, note))
        # end answer


def one_way_s(agent: Any, box: Mailbox, mine: Any, theirs: Any, peer: str, rounds: int) -> float:
    """Seconds that one message takes: `ping-i` goes out, the peer answers with `pong-i`, `rounds` times.

    A round has two messages. The first round makes connections and is not counted.
    """
    # begin answer
    began = 0.0
    for number in range(rounds + 1):
        if number == 1:
            began = time.perf_counter()
        put(agent, mine, theirs, peer, b"ping-%d" % number)
        box.wait(peer, b"pong-%d" % number)
    return (time.perf_counter() - began) / rounds / 2
    # end answer
