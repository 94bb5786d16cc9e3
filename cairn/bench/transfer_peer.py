"""The other process of `cairn bench comm --transfer`: memory that is read, or a prefill that is handed over.

    python -m cairn.bench.transfer_peer serve KIND BYTES                 prints its address, ends with its stdin
    python -m cairn.bench.transfer_peer give KIND LAYOUT STREAMED SECONDS
                                                                        prints an offer; computes (sleeps) layer by
                                                                        layer when told to; prints when it was through

Not for people: `cairn.bench.transfer` starts it.
"""

import sys
import time

import msgspec
import numpy as np

from cairn.comm.transfer.choose_transport import make_transport
from cairn.comm.transfer.handshake import Side
from cairn.comm.transfer.kv import REGION, KVLayout
from cairn.comm.transfer.page_sender import PageSender, offer_of

REQUEST = "bench"


def serve(kind: str, nbytes: str) -> None:
    end = make_transport(kind, "bench-owner")
    memory = end.allocate(REGION, int(nbytes))
    memory[:] = np.arange(len(memory), dtype=np.uint32).astype(
        np.uint8
    )  # touched, so that it exists
    print(end.listen(), flush=True)
    sys.stdin.read()
    end.close()


def give(kind: str, layout: str, streamed: str, seconds: str) -> None:
    """Compute stands for a GPU's: this process only waits, and the wire is free meanwhile."""
    shape = msgspec.json.decode(layout, type=KVLayout)
    end = make_transport(kind, "bench-sender")
    end.allocate(REGION, shape.region_bytes(0))[:] = 7
    side = PageSender(end, Side("bench", 0, shape))
    table = list(range(shape.pages))
    address = side.listen()
    side.grant(REQUEST, table, time.monotonic(), ready=False)
    offer = offer_of(
        [side], [address], REQUEST, table, shape.pages * shape.page_size, streamed == "yes"
    )
    print(msgspec.json.encode(offer).decode(), flush=True)
    sys.stdin.readline()
    for layer in range(shape.contents.layers):
        until = time.monotonic() + float(seconds)
        while (remaining_s := until - time.monotonic()) > 0:
            side.step(time.monotonic(), wait_s=min(remaining_s, 0.002))
        side.ready(REQUEST, layer + 1)
    print(time.monotonic(), flush=True)
    while not side.step(time.monotonic(), wait_s=0.001):
        pass
    end.close()


if __name__ == "__main__":
    {"serve": serve, "give": give}[sys.argv[1]](*sys.argv[2:])
