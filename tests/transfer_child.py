"""The other process of a hand-over: `python transfer_child.py KIND give|hold|take`, the offer as JSON.

give    grants a full sequence, prints the offer, ends when its pages are free again
hold    grants one of which no layer ever becomes ready, prints the offer, and waits to be killed
take    reads an offer from stdin, prints `claimed` when it may read, and waits to be killed
"""

import sys
import time

import msgspec
import numpy as np
from transfer_ends import PATIENT, make_end
from transfer_oracle import store, whole_cache

from cairn.comm.transfer.handover_messages import Offer
from cairn.comm.transfer.handshake import Side
from cairn.comm.transfer.kv import REGION, KVContents, KVLayout
from cairn.comm.transfer.lease import Terms
from cairn.comm.transfer.mover import Patience
from cairn.comm.transfer.page_receiver import PageReceiver
from cairn.comm.transfer.page_sender import PageSender, offer_of

CONTENTS = KVContents(model="m", layers=3, kv_heads=4, width=16)
SOURCE = KVLayout(contents=CONTENTS, page_size=8, pages=20)
TARGET = KVLayout(contents=CONTENTS, page_size=16, pages=10, heads_first=True)
TERMS = Terms(lease_s=120, unclaimed_s=600, read_s=600)  # a loaded machine takes its time
LENGTH, TABLE, OTHER = 100, list(range(19, 6, -1)), [9, 2, 7, 1, 0, 3, 8]


def sender(
    kind: str, ready: bool, patience: Patience = PATIENT
) -> tuple[PageSender, Offer, np.ndarray]:
    end = make_end(kind, "sender", patience)
    memory = end.allocate(REGION, SOURCE.region_bytes(0))
    store(SOURCE, [memory], TABLE, whole_cache(CONTENTS, LENGTH), (0, LENGTH))
    give = PageSender(end, Side("sender", 0, SOURCE), TERMS)
    address = give.listen()
    give.grant("r", TABLE, time.monotonic(), ready=ready)
    return give, offer_of([give], [address], "r", TABLE, LENGTH, streamed=not ready), memory


def receiver(
    kind: str, offer: Offer, patience: Patience = PATIENT
) -> tuple[PageReceiver, np.ndarray]:
    end = make_end(kind, "receiver", patience)
    memory = end.allocate(REGION, TARGET.region_bytes(0))
    reader = PageReceiver(end, Side("receiver", 0, TARGET), TERMS)
    reader.listen()
    reader.receive(offer, OTHER, time.monotonic())
    return reader, memory


def main(kind: str, role: str) -> None:
    if role == "take":
        reader, _ = receiver(kind, msgspec.json.decode(sys.stdin.readline(), type=Offer))
        said = False
        while True:
            reader.step(time.monotonic(), wait_s=0.05)
            if not said and reader._may_read("sender", "r", time.monotonic()):
                print("claimed", flush=True)
                said = True
    give, offer, _ = sender(kind, ready=role == "give")
    print(msgspec.json.encode(offer).decode(), flush=True)
    freed = []
    while not freed:
        freed = give.step(time.monotonic(), wait_s=0.05)
    print(freed[0].why, flush=True)
    give.transport.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
