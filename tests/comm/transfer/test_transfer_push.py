"""Fresh weights pushed from a trainer to a server over every transport."""

import numpy as np
import pytest
from transfer_ends import KINDS, closing, make_end, settle, wait_for

from cairn.comm.transfer.byte_runs import ByteRuns
from cairn.comm.transfer.plan import make_plan
from cairn.comm.transfer.transport import Notification, PeerGone, PeerJoined
from cairn.comm.transfer.weights import REGION, HeldTensor, pack, rows_of, share_of


@pytest.mark.parametrize("kind", KINDS)
def test_fresh_weights_are_written_from_a_trainer_to_a_server(kind):
    """FSDP over two trainers to tensor parallel over two servers, each trainer pushing what it holds."""
    shapes = {"embedding": ((30, 8), None), "up": ((24, 8), 0), "down": ((8, 24), 1)}
    rng = np.random.default_rng(0)
    whole = {
        name: rng.integers(0, 1 << 16, shape, dtype=np.uint16)
        for name, (shape, _) in shapes.items()
    }
    held, wanted = (
        [pack(rank, (HeldTensor(name, 2, cut(shape, axis, rank)) for name, (shape, axis) in shapes.items()))
         for rank in range(2)]
        for cut in (lambda shape, axis, rank: rows_of(shape, rank, 2), lambda *part: share_of(*part, 2))
    )  # fmt: skip
    # One end for each side: a rank is a region.
    trainer, server = make_end(kind, "trainer"), make_end(kind, "server")
    with closing(trainer, server):
        sources = [trainer.allocate(f"{REGION}{rank}", one.nbytes) for rank, one in enumerate(held)]
        targets = [
            server.allocate(f"{REGION}{rank}", one.nbytes) for rank, one in enumerate(wanted)
        ]
        for memory, one in zip(sources, held, strict=True):
            fill(memory, one.shards, whole)
        trainer.listen()
        peer = trainer.connect(server.listen())
        plan = make_plan(
            [s for one in held for s in one.shards], [s for one in wanted for s in one.shards]
        )
        settle(
            trainer,
            {
                trainer.write(
                    peer, f"{REGION}{leg.source_rank}", f"{REGION}{leg.target_rank}", leg.runs
                )
                for leg in plan.legs
            },
        )
        for memory, one in zip(targets, wanted, strict=True):
            expected = np.zeros_like(memory)
            fill(expected, one.shards, whole)
            assert np.array_equal(memory, expected)


def fill(memory: np.ndarray, shards: list, whole: dict[str, np.ndarray]) -> None:
    for shard in shards:
        part = np.ascontiguousarray(whole[shard.tensor][tuple(slice(*ends) for ends in shard.box)])
        memory[shard.base : shard.base + shard.nbytes] = part.view(np.uint8).ravel()


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_at_once_and_runs_of_every_length(kind):
    """Two ends that read from each other and write to each other at the same time: nothing blocks."""
    ends = [make_end(kind, name) for name in ("a", "b")]
    size = 3 << 20
    with closing(*ends):
        rng = np.random.default_rng(0)
        memories = []
        for end in ends:
            for region in ("from", "read", "written"):
                memory = end.allocate(region, size)
                memory[:] = rng.integers(0, 256, size, dtype=np.uint8) if region == "from" else 0
                memories.append(memory)
        ends[1].connect((ends[0].listen(), ends[1].listen())[0])
        ends[0].events(10)  # it knows the other
        lengths = rng.permutation(
            np.concatenate((np.arange(1, 900), [0, 0, 70_000, 300_001, 1 << 20]))
        )
        starts = np.cumsum(lengths) - lengths
        runs = ByteRuns(
            starts, starts[::-1].copy(), lengths
        )  # targets overlap nothing: they are laid out anew
        order = rng.permutation(len(lengths))
        runs.target[order] = np.cumsum(lengths[order]) - lengths[order]
        tickets = [
            {end.read(other, "from", "read", runs), end.write(other, "from", "written", runs)}
            for end, other in zip(ends, ("b", "a"), strict=True)
        ]
        for end, some in zip(ends, tickets, strict=True):
            settle(end, some)
        for side, other in ((0, 3), (3, 0)):
            expected = np.zeros(size, np.uint8)
            for origin, goal, length in zip(*runs, strict=True):
                expected[goal : goal + length] = memories[other][origin : origin + length]
            assert np.array_equal(memories[side + 1], expected)  # what it read
            assert np.array_equal(memories[side + 2], expected)  # what was written to it


def test_an_empty_transfer_is_done_at_once():
    ends = [make_end("tcp", name) for name in ("a", "b")]
    nothing = ByteRuns(*(np.zeros(0, np.int64) for _ in range(3)))
    with closing(*ends):
        for end in ends:
            end.allocate("kv", 10)
        address = ends[0].listen()
        ends[1].listen()
        ends[1].connect(address)
        settle(
            ends[1],
            {ends[1].read("a", "kv", "kv", nothing), ends[1].write("a", "kv", "kv", nothing)},
        )


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_what_was_said_before_closing_arrives(kind):
    here, there = make_end(kind, "here"), make_end(kind, "there")
    with closing(here, there):
        there.listen()
        address = here.listen()
        there.connect(address)
        wait_for(here, lambda event: isinstance(event, PeerJoined))
        for number in range(500):
            there.notify("here", str(number).encode())
        there.close()
        seen = wait_for(here, lambda event: isinstance(event, PeerGone))
    heard = [event.payload for event in seen if isinstance(event, Notification)]
    assert heard == [str(number).encode() for number in range(500)]
