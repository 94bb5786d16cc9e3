"""Whole hand-overs on a network that fails: what is taken is right, what is not taken never lands, nothing leaks."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_ends import closing, make_end
from transfer_inprocess import Fabric, Faults
from transfer_oracle import garbage, store, whole_cache

from cairn.comm.transfer.byte_runs import NO_RUNS, ByteRuns
from cairn.comm.transfer.errors import TransferError
from cairn.comm.transfer.handshake import Side
from cairn.comm.transfer.kv import REGION, KVContents, KVLayout, kv_shards
from cairn.comm.transfer.lease import Terms
from cairn.comm.transfer.page_receiver import NotReceived, PageReceiver, Received
from cairn.comm.transfer.page_sender import PageSender, offer_of
from cairn.comm.transfer.shard import TensorShard

CONTENTS = KVContents(model="m", layers=4, kv_heads=2, width=4)
SOURCE = KVLayout(contents=CONTENTS, page_size=4, pages=8, tp=2)
TARGET = KVLayout(contents=CONTENTS, page_size=8, pages=6, tp=1, pp=2, heads_first=True)
TERMS = Terms(lease_s=3.0, beat_s=0.4, unclaimed_s=8.0, read_s=4.0)
LENGTH, TABLE, OTHER = 13, [5, 0, 7, 2], [3, 1]
STEP = 0.1


class World(NamedTuple):
    fabric: Fabric
    senders: list[PageSender]
    receivers: list[PageReceiver]
    memories: dict[str, np.ndarray]
    whole: np.ndarray
    addresses: list[str]


def make_world(faults: Faults = Faults(), seed: int = 0) -> World:  # noqa: B008
    fabric = Fabric(faults, seed)
    memories: dict[str, np.ndarray] = {}
    ends = []
    for name, layout in (("p", SOURCE), ("d", TARGET)):
        for rank, old in enumerate(garbage(layout, seed)):
            end = fabric.end(f"{name}{rank}")
            memories[end.name] = end.allocate(REGION, len(old))
            memories[end.name][:] = old
            ends.append((end, Side(name, rank, layout)))
    senders = [PageSender(end, side, TERMS) for end, side in ends if side.engine == "p"]
    receivers = [PageReceiver(end, side, TERMS) for end, side in ends if side.engine == "d"]
    whole = whole_cache(CONTENTS, LENGTH)
    for receiver in receivers:
        receiver.listen()
    return World(
        fabric, senders, receivers, memories, whole, [sender.listen() for sender in senders]
    )


def fill(world: World, layers: tuple[int, int] | None = None) -> None:
    ours = [world.memories[sender.transport.name] for sender in world.senders]
    store(SOURCE, ours, TABLE, world.whole, (0, LENGTH), layers)


def expected_of(world: World, before: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the receivers' memory should be."""
    copies = [before[f"d{rank}"].copy() for rank in range(TARGET.ranks)]
    store(TARGET, copies, OTHER, world.whole, (0, LENGTH))
    return {f"d{rank}": copy for rank, copy in enumerate(copies)}


def start(world: World, streamed: bool = False, chunked: bool = False, begin: int = 0) -> None:
    for sender in world.senders:
        sender.grant("r", TABLE, world.fabric.now, ready=not streamed and not chunked)
    offer = offer_of(world.senders, world.addresses, "r", TABLE, LENGTH, streamed, chunked)
    for receiver in world.receivers:
        receiver.receive(offer, OTHER, world.fabric.now, begin)


def test_a_hand_over():
    world = make_world()
    fill(world)
    expected = expected_of(world, {name: memory.copy() for name, memory in world.memories.items()})
    start(world)
    outcomes, freed = [], []
    for _ in range(30):
        world.fabric.advance(STEP)
        outcomes += [one for receiver in world.receivers for one in receiver.step(world.fabric.now)]
        freed += [one for sender in world.senders for one in sender.step(world.fabric.now)]
    assert outcomes == [Received("r")] * 2
    assert [(one.pages, one.why) for one in freed] == [(tuple(TABLE), "released")] * 2
    for name, memory in expected.items():
        assert np.array_equal(world.memories[name], memory)


def test_layers_travel_while_the_next_ones_are_computed():
    """When layer n + 1 is computed, layer n is there: nothing waits for the end of the prefill."""
    world = make_world()
    before = {name: memory.copy() for name, memory in world.memories.items()}
    expected = expected_of(world, before)
    start(world, streamed=True)
    outcomes = []

    def run(steps: int) -> None:
        for _ in range(steps):
            world.fabric.advance(STEP)
            outcomes.extend(
                one for receiver in world.receivers for one in receiver.step(world.fabric.now)
            )
            for sender in world.senders:
                assert not sender.step(world.fabric.now) or outcomes

    run(3)
    for layer in range(CONTENTS.layers):
        assert not outcomes or layer >= 2  # the first stage's rank is through after its own layers
        fill(world, (layer, layer + 1))
        for sender in world.senders:
            sender.ready("r", layer + 1)
        run(3)
        for shard in kv_shards(TARGET, OTHER, (0, LENGTH), (0, layer + 1)):
            name = f"d{shard.rank}"
            assert np.array_equal(
                bytes_of(world.memories[name], shard), bytes_of(expected[name], shard)
            )
        for shard in kv_shards(TARGET, OTHER, (0, LENGTH), (layer + 1, CONTENTS.layers)):
            name = f"d{shard.rank}"
            assert np.array_equal(
                bytes_of(world.memories[name], shard), bytes_of(before[name], shard)
            )
    assert outcomes == [Received("r")] * 2


@pytest.mark.parametrize("begin", [0, 4, LENGTH])
def test_tokens_travel_while_the_next_chunk_is_computed(begin):
    """Whatever the chunks are: what is ready on every rank is read, and nothing else; a prefix here is left alone."""
    world = make_world()
    before = {name: memory.copy() for name, memory in world.memories.items()}
    start(world, chunked=True, begin=begin)
    outcomes = []

    def run(steps: int) -> None:
        for _ in range(steps):
            world.fabric.advance(STEP)
            outcomes.extend(
                one for receiver in world.receivers for one in receiver.step(world.fabric.now)
            )
            for sender in world.senders:
                sender.step(world.fabric.now)

    def expected(stop: int) -> dict[str, np.ndarray]:
        copies = [before[f"d{rank}"].copy() for rank in range(TARGET.ranks)]
        store(TARGET, copies, OTHER, world.whole, (begin, max(begin, stop)))
        return {f"d{rank}": copy for rank, copy in enumerate(copies)}

    run(3)
    fill(world)
    for stop in (3, 4, 9, LENGTH):
        assert not outcomes or begin == LENGTH
        world.senders[0].ready("r", stop)
        run(3)  # one of two ranks is not enough
        world.senders[1].ready("r", stop)
        run(3)
        for name, memory in expected(stop).items():
            assert np.array_equal(world.memories[name], memory), (name, stop)
    assert outcomes == [Received("r")] * 2


def bytes_of(memory: np.ndarray, shard: TensorShard) -> np.ndarray:
    places = np.array([shard.base])
    for axis in shard.axes:
        places = (places[:, None] + axis.offsets).ravel()
    return memory[places[:, None] + np.arange(shard.itemsize)]


@st.composite
def misfortunes(draw):
    faults = Faults(
        drop=draw(st.sampled_from([0.0, 0.1, 0.4])),
        duplicate=draw(st.sampled_from([0.0, 0.3])),
        delay_s=draw(st.sampled_from([(0.0, 0.0), (0.0, 0.5), (0.0, 4.0)])),
        seen_s=draw(st.sampled_from([0.0, 0.5])),
    )
    names = st.sampled_from(["p0", "p1", "d0", "d1"])
    acts = st.sampled_from(["kill", "freeze", "thaw", "suspect", "withdraw", "cancel"])
    events = draw(st.lists(st.tuples(st.integers(0, 60), acts, names), max_size=4))
    kind = draw(st.sampled_from(["whole", "layers", "chunks"]))
    return faults, draw(st.integers(0, 1000)), kind, sorted(events)


@settings(max_examples=60)
@given(misfortunes())
def test_whatever_happens_it_is_right_or_not_taken_and_nothing_leaks(misfortune):
    faults, seed, kind, events = misfortune
    world = make_world(faults, seed)
    fill(world)
    expected = expected_of(world, {name: memory.copy() for name, memory in world.memories.items()})
    start(world, kind == "layers", kind == "chunks")
    left = list(events)
    results: dict[str, Received | NotReceived] = {}
    reused: dict[str, np.ndarray] = {}  # target memory after its pages were given to somebody else
    freed: dict[str, list] = {sender.transport.name: [] for sender in world.senders}
    for tick in range(400):
        while left and left[0][0] <= tick:
            misbehave(world, *left.pop(0)[1:], freed)
        world.fabric.advance(STEP)
        now = world.fabric.now
        for sender in world.senders:
            if kind != "whole" and sender.transport.name in world.fabric.ends:
                most = CONTENTS.layers if kind == "layers" else LENGTH
                sender.ready("r", min(most, 1 + tick // 5))
            if running(world, sender):
                note_freed(world, sender, sender.step(now), freed)
        for receiver in world.receivers:
            for outcome in receiver.step(now) if running(world, receiver) else ():
                name = receiver.transport.name
                assert name not in results
                results[name] = outcome
                if isinstance(outcome, Received):
                    assert np.array_equal(world.memories[name], expected[name]), name
                else:
                    world.memories[name][:] = 0xAB
                    reused[name] = world.memories[name].copy()
    for receiver in world.receivers:
        if running(world, receiver):
            assert receiver.transport.name in results
            assert not receiver.sequences
    for name, memory in reused.items():
        assert np.array_equal(world.memories[name], memory), name  # nothing landed afterwards
    for sender in world.senders:
        if running(world, sender):
            assert len(freed[sender.transport.name]) == 1
            assert not sender.owner.held()


def running(world: World, one: PageSender | PageReceiver) -> bool:
    """Neither dead nor frozen: a process that gets no time takes no steps."""
    name = one.transport.name
    return name in world.fabric.ends and name not in world.fabric.frozen


def misbehave(world: World, act: str, name: str, freed: dict[str, list]) -> None:
    if act in ("kill", "freeze", "thaw"):
        getattr(world.fabric, act)(name)
    if act == "suspect":
        for other in ("p0", "p1", "d0", "d1"):
            if other[0] != name[0]:
                world.fabric.suspect(name, other, after_s=1.5)
    for sender in world.senders:
        if act == "withdraw" and sender.transport.name == name and running(world, sender):
            note_freed(world, sender, sender.withdraw("r", world.fabric.now), freed)
    for receiver in world.receivers:
        if act == "cancel" and receiver.transport.name == name and running(world, receiver):
            receiver.cancel("r")


def note_freed(world: World, sender: PageSender, found: list, freed: dict[str, list]) -> None:
    """Freed pages have a new owner at once, who writes to them."""
    for one in found:
        freed[sender.transport.name].append(one)
        memory = world.memories[sender.transport.name]
        memory[:] = 0xCD


def test_pages_of_a_reader_that_is_only_silent_wait_for_its_lease():
    """The sender senders it up, but it lives and is in the middle of a read: its pages must not change yet."""
    world = make_world()
    fill(world)
    expected = expected_of(world, {name: memory.copy() for name, memory in world.memories.items()})
    freed: dict[str, list] = {"p0": [], "p1": []}
    outcomes: list = []

    def run(steps: int) -> None:
        for _ in range(steps):
            world.fabric.advance(STEP)
            for receiver in world.receivers:
                outcomes.extend(receiver.step(world.fabric.now))
            for sender in world.senders:
                note_freed(world, sender, sender.step(world.fabric.now), freed)

    start(world)
    run(1)  # the beats have arrived, and are answered
    world.fabric.faults = Faults(delay_s=(1.0, 1.0))
    run(1)  # the reads are posted, and take a while
    assert all(receiver.sequences["r"].under_way for receiver in world.receivers)
    for sender in ("p0", "p1"):
        for receiver in ("d0", "d1"):
            world.fabric.suspect(sender, receiver, after_s=2.0)
    run(12)
    assert outcomes == [Received("r")] * 2
    assert all(np.array_equal(world.memories[name], memory) for name, memory in expected.items())
    assert freed == {"p0": [], "p1": []}
    run(40)
    assert [[one.why for one in some] for some in freed.values()] == [["expired"]] * 2


def test_a_prefix_that_is_there_already_is_left_alone():
    world = make_world()
    fill(world)
    before = {name: memory.copy() for name, memory in world.memories.items()}
    for sender in world.senders:
        sender.grant("r", TABLE, 0.0)
    offer = offer_of(world.senders, world.addresses, "r", TABLE, LENGTH)
    for receiver in world.receivers:
        receiver.receive(offer, OTHER, 0.0, start=LENGTH)  # all of it
    outcomes = [one for receiver in world.receivers for one in receiver.step(0.0)]
    assert outcomes == [Received("r")] * 2
    world.fabric.advance(STEP)
    assert [one.why for sender in world.senders for one in sender.step(0.1)] == ["released"] * 2
    assert all(np.array_equal(world.memories[name], before[name]) for name in ("d0", "d1"))


def test_an_offer_of_an_engine_that_was_restarted_is_not_taken():
    world = make_world()
    fill(world)
    for sender in world.senders:
        sender.side = Side("p again", sender.side.rank, SOURCE)
        sender.listen()
    for sender in world.senders:
        sender.grant("r", TABLE, 0.0)
    offer = offer_of(world.senders, world.addresses, "r", TABLE, LENGTH)
    stale = type(offer)(
        request="r",
        engine="p",
        layout=SOURCE,
        addresses=offer.addresses,
        table=TABLE,
        tokens=LENGTH,
    )
    world.receivers[0].receive(stale, OTHER, 0.0)
    outcomes = []
    for _ in range(10):
        world.fabric.advance(STEP)
        outcomes += world.receivers[0].step(world.fabric.now)
        for sender in world.senders:
            sender.step(world.fabric.now)
    assert "restarted" in outcomes[0].reason


def test_a_cache_that_does_not_fit_is_refused_on_both_sides():
    """Over TCP: each side hears what the other has."""
    source, target = make_end("tcp", "p0"), make_end("tcp", "d0")
    other = KVContents(model="m", layers=4, kv_heads=2, width=4, dtype="float32")
    with closing(source, target):
        source.allocate(REGION, SOURCE.region_bytes(0))
        wrong = KVLayout(contents=other, page_size=8, pages=6)
        target.allocate(REGION, wrong.region_bytes(0))
        sender = PageSender(source, Side("p", 0, SOURCE), TERMS)
        receiver = PageReceiver(target, Side("d", 0, wrong), TERMS)
        address = sender.listen()
        receiver.listen()
        honest = offer_of([sender], [address], "r", TABLE, LENGTH)
        with pytest.raises(TransferError, match="dtype 'bfloat16' / 'float32'"):
            receiver.receive(honest, OTHER, 0.0)
        # An offer that lies about the layout is found out by the handshake.
        lying = type(honest)(
            request="r", engine="p", layout=wrong, addresses=[address], table=[0, 1], tokens=LENGTH
        )
        receiver.receive(lying, OTHER, 0.0)
        outcomes: list = []
        for number in range(100):
            outcomes += receiver.step(number * 0.1, wait_s=0.1)
            sender.step(number * 0.1, wait_s=0.05)
            if outcomes and sender.refused:
                break
        for text in (outcomes[0].reason, sender.refused[0]):
            assert CONTENTS.words() in text
            assert other.words() in text


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_ranges_beyond_a_region_are_refused(kind):
    ends = [make_end(kind, name) for name in ("a", "b")]
    with closing(*ends):
        for end in ends:
            end.allocate(REGION, 100)
        address = ends[0].listen()
        ends[1].listen()
        ends[1].connect(address)
        one = np.array([1], np.int64)
        with pytest.raises(TransferError, match=r"byte 101 of region 'kv', which has 100"):
            ends[1].read("a", REGION, REGION, ByteRuns(one, one * 0, one * 100))
        with pytest.raises(TransferError, match="no region 'weights'; there are kv"):
            ends[1].read("a", "weights", REGION, NO_RUNS)
        with pytest.raises(TransferError, match="'c' is not connected"):
            ends[1].read("c", REGION, REGION, NO_RUNS)
        with pytest.raises(TransferError, match="register regions first"):
            ends[1].allocate("more", 10)
