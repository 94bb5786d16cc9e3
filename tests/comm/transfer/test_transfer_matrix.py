"""The whole matrix of layouts over every transport, bitwise equal to brute force."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from transfer_ends import KINDS, closing, make_end, settle
from transfer_oracle import garbage, store, whole_cache

from cairn.comm.transfer.endpoint import TransferEndpoint
from cairn.comm.transfer.kv import REGION, KVContents, KVLayout, plan_kv

TPS, PAGES = (1, 2, 4), (8, 16, 32, 64)
LENGTH = 75  # tokens: pages of every size are partly filled
CONTENTS = {
    "mha": KVContents(model="m", layers=2, kv_heads=8, width=4),
    "gqa": KVContents(
        model="m", layers=2, kv_heads=2, width=8
    ),  # with tp 4 each head has two holders
    "mla": KVContents(model="m", layers=4, kv_heads=1, width=12, latent=True),
}


def table_of(layout: KVLayout, seed: int) -> list[int]:
    needed = -(-LENGTH // layout.page_size)
    return np.random.default_rng(seed).permutation(layout.pages)[:needed].tolist()


def layout_of(contents: KVContents, tp: int, page: int, heads_first: bool) -> KVLayout:
    pages = -(-LENGTH // page) + 2
    return KVLayout(contents=contents, page_size=page, pages=pages, tp=tp, heads_first=heads_first)


LARGEST = max(
    layout_of(contents, tp, page, False).region_bytes(0)
    for contents in CONTENTS.values()
    for tp in TPS
    for page in PAGES
)


class Cluster(NamedTuple):
    """Ranks that give and ranks that take, every one of these connected to every one of those."""

    senders: list[TransferEndpoint]
    receivers: list[TransferEndpoint]
    given: list[np.ndarray]  # memory of each rank
    taken: list[np.ndarray]


@pytest.fixture(scope="module", params=KINDS)
def cluster(request):
    # Each NIXL agent has busy threads of its own: there one end has the regions of all ranks.
    shared = request.param == "nixl"
    sides = [
        [make_end(request.param, f"{side}{rank}") for rank in range(1 if shared else max(TPS))]
        for side in ("p", "d")
    ]
    senders, receivers = (side * max(TPS) if shared else side for side in sides)
    with closing(*sides[0], *sides[1]):
        given, taken = (
            [end.allocate(f"{REGION}{rank}", LARGEST) for rank, end in enumerate(side)]
            for side in (senders, receivers)
        )
        addresses = [end.listen() for end in sides[0]]
        for receiver in sides[1]:
            receiver.listen()
            for address in addresses:
                receiver.connect(address)
        yield Cluster(senders, receivers, given, taken)


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize(("source_tp", "target_tp"), list(itertools.product(TPS, TPS)))
def test_any_layout_to_any_layout(cluster, kind, source_tp, target_tp):
    whole = whole_cache(CONTENTS[kind], LENGTH)
    for number, (page, other) in enumerate(itertools.product(PAGES, PAGES)):
        source = layout_of(CONTENTS[kind], source_tp, page, heads_first=bool(number & 1))
        target = layout_of(CONTENTS[kind], target_tp, other, heads_first=bool(number & 2))
        hand_over(source, target, cluster, whole)


def hand_over(source: KVLayout, target: KVLayout, cluster: Cluster, whole: np.ndarray) -> None:
    tables = table_of(source, 1), table_of(target, 2)
    ours = [cluster.given[rank][: source.region_bytes(rank)] for rank in range(source.tp)]
    theirs = [cluster.taken[rank][: target.region_bytes(rank)] for rank in range(target.tp)]
    for memory, old in zip(
        (*ours, *theirs), (*garbage(source, 3), *garbage(target, 4)), strict=True
    ):
        memory[:] = old
    store(source, ours, tables[0], whole, (0, LENGTH))
    expected = [memory.copy() for memory in theirs]
    store(target, expected, tables[1], whole, (0, LENGTH))
    plan = plan_kv(source, tables[0], target, tables[1], (0, LENGTH))
    for rank in range(target.tp):
        receiver = cluster.receivers[rank]
        tickets = {
            receiver.read(
                cluster.senders[leg.source_rank].name,
                f"{REGION}{leg.source_rank}",
                f"{REGION}{rank}",
                leg.runs,
            )
            for leg in plan.to_rank(rank)
        }
        settle(receiver, tickets)
    for rank, (got, wanted) in enumerate(zip(theirs, expected, strict=True)):
        assert np.array_equal(got, wanted), (source.words(), target.words(), rank)
