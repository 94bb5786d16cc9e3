"""Weights of a trainer into a server that cuts them otherwise, over real transports; a checkpoint into another cut."""

import threading

import numpy as np
import pytest
from safetensors.numpy import save_file
from transfer_ends import KINDS, PATIENT, closing, make_end, wait_for

from cairn.comm.transfer.endpoint import TransferEndpoint
from cairn.comm.transfer.errors import PeerLost, TransferError, TransferRefused
from cairn.comm.transfer.tcp import TcpMover
from cairn.comm.transfer.transport import PeerGone
from cairn.comm.transfer.weight_files import read_from, stored_in
from cairn.comm.transfer.weight_sync import WeightSink, WeightSource
from cairn.comm.transfer.weights import (
    HeldTensor,
    PackedWeightShards,
    cut_of,
    pack,
    rows_of,
    share_of,
)

SHAPES = {"embed": (37, 16), "up": (48, 16), "down": (16, 48), "norm": (16,)}
AXES = {"embed": None, "up": 0, "down": 1, "norm": None}
LONG = 60.0


def weights(version: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(version)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def trainer(ranks: int) -> list[PackedWeightShards]:
    """FSDP: rows."""
    return [
        pack(
            rank,
            (HeldTensor(name, 4, rows_of(shape, rank, ranks)) for name, shape in SHAPES.items()),
        )
        for rank in range(ranks)
    ]


def server(ranks: int) -> list[PackedWeightShards]:
    """Tensor parallel; what is not cut is whole on every rank."""
    return [
        pack(rank, (HeldTensor(name, 4, share_of(shape, AXES[name], rank, ranks)) for name, shape in SHAPES.items()))
        for rank in range(ranks)
    ]  # fmt: skip


def fill(memory: np.ndarray, packed: PackedWeightShards, whole: dict[str, np.ndarray]) -> None:
    """By numpy's own slicing."""
    for shard in packed.shards:
        part = whole[shard.tensor][tuple(slice(*ends) for ends in shard.box)]
        memory[shard.base : shard.base + shard.nbytes] = (
            np.ascontiguousarray(part).view(np.uint8).ravel()
        )


def as_it_should_be(packed: PackedWeightShards, version: int) -> bytes:
    memory = np.zeros(max(packed.nbytes, 1), np.uint8)
    fill(memory, packed, weights(version))
    return memory.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_of_the_server_has_the_weights_of_the_step(kind):
    held, wanted = trainer(3), server(2)
    ends = [make_end(kind, f"trainer{rank}") for rank in range(3)]
    readers = [make_end(kind, f"server{rank}") for rank in range(2)]
    with closing(*ends, *readers):
        sources = [WeightSource(end, one) for end, one in zip(ends, held, strict=True)]
        got: dict[int, list[bytes]] = {0: [], 1: []}
        wrong: list[BaseException] = []

        def serve(rank: int) -> None:
            try:
                addresses = [source.address for source in sources]
                sink = WeightSink(readers[rank], wanted[rank], held, addresses)
                for version in (1, 2, 3):
                    sink.pull(version, LONG)
                    got[rank].append(sink.memory.tobytes())
                whole = sum(shard.nbytes for shard in wanted[rank].shards)
                assert sink.bytes_read == 3 * whole  # every byte once
            except BaseException as error:  # noqa: BLE001  the test has to see it
                wrong.append(error)

        def train(source: WeightSource) -> None:
            try:
                for version in (1, 2, 3):
                    fill(source.memory, source.held, weights(version))
                    source.publish(version)
                    source.until_taken(version, 2, LONG)
            except BaseException as error:  # noqa: BLE001
                wrong.append(error)

        threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(2)]
        threads += [threading.Thread(target=train, args=(source,)) for source in sources]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    for rank in range(2):
        assert got[rank] == [as_it_should_be(wanted[rank], version) for version in (1, 2, 3)]


def test_a_source_that_is_cut_otherwise_is_refused():
    end, reader = make_end("tcp", "a"), make_end("tcp", "b")
    with closing(end, reader):
        source = WeightSource(end, trainer(2)[0])
        with pytest.raises(
            TransferRefused, match=r"source 0 \(a\) has another layout.*rank 0: 4 pieces"
        ):
            WeightSink(reader, server(1)[0], [trainer(1)[0]], [source.address])


def test_who_is_waited_for_is_named():
    end, reader = make_end("tcp", "a"), make_end("tcp", "b")
    with closing(end, reader):
        source = WeightSource(end, trainer(1)[0])
        with pytest.raises(TransferError, match=r"0 of 1 readers have them after 0\.1 s"):
            source.until_taken(1, 1, 0.1)
        sink = WeightSink(reader, server(1)[0], trainer(1), [source.address])
        with pytest.raises(TransferError, match=r"see weights 5 of source 0 \(a\) within 0.1 s"):
            sink.pull(5, 0.1)
        source.publish(4)
        with pytest.raises(TransferError, match=r"0 of 1 readers"):
            source.until_taken(4, 1, 0.5)
        sink.close()
        with pytest.raises(PeerLost, match="reader b is gone"):
            source.until_taken(4, 1, LONG)


def test_a_source_that_dies_is_named():
    end, reader = make_end("tcp", "a"), make_end("tcp", "b")
    with closing(end, reader):
        source = WeightSource(end, trainer(1)[0])
        sink = WeightSink(reader, server(1)[0], trainer(1), [source.address])
        source.close()
        with pytest.raises(PeerLost, match=r"source 0 \(a\) is gone"):
            sink.pull(1, LONG)


def test_an_end_that_closes_while_somebody_comes_in_leaves_nobody_waiting():
    """Half introduced, then closed: the other side hears of it by the connection, not by a long silence."""
    coming, closed = threading.Event(), threading.Event()

    class Slow(TcpMover):
        def admit(self, peer, about, connection):
            coming.set()
            assert closed.wait(LONG)

    end, caller = TransferEndpoint("a", Slow(), patience=PATIENT), make_end("tcp", "b")
    with closing(end, caller):
        address = end.listen()
        caller.listen()
        caller.connect(address)
        assert coming.wait(LONG)
        closing_it = threading.Thread(target=end.close)
        closing_it.start()
        assert end._closed.wait(LONG)
        closed.set()
        closing_it.join(LONG)
        wait_for(caller, lambda event: isinstance(event, PeerGone))
        assert end.peers == {}


def test_what_nobody_holds_is_refused():
    reader = make_end("tcp", "b")
    with closing(reader), pytest.raises(TransferError, match="no rank holds"):
        WeightSink(reader, server(1)[0], [pack(0, [])], ["127.0.0.1:1"])


@pytest.fixture
def files(tmp_path):
    whole = weights(9)
    names = list(whole)
    paths = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    save_file({name: whole[name] for name in names[:2]}, paths[0], metadata={"format": "pt"})
    save_file({name: whole[name] for name in names[2:]}, paths[1])
    return paths


@pytest.mark.parametrize("layout", [trainer(1), trainer(3), server(2), server(4)])
def test_a_checkpoint_is_read_by_every_layout(files, layout):
    for one in layout:
        assert read_from(files, one).tobytes() == as_it_should_be(one, 9)[: one.nbytes]


def test_tensors_are_found_where_safetensors_put_them(files):
    found = {shard.tensor: shard for shard in stored_in(files)}
    assert set(found) == set(SHAPES)
    for name, shard in found.items():
        raw = files[shard.rank].read_bytes()[shard.base : shard.base + shard.nbytes]
        assert raw == weights(9)[name].tobytes()


def test_files_that_cannot_serve_are_refused(files, tmp_path):
    with pytest.raises(TransferError, match="no rank holds down"):
        read_from(files[:1], server(1)[0])
    with pytest.raises(TransferError, match="4 bytes for each element in the files, 2 are wanted"):
        read_from(files, pack(0, [HeldTensor("up", 2, cut_of((48, 16), None))]))
    with pytest.raises(TransferError, match="cannot read"):
        read_from([tmp_path / "absent"], server(1)[0])
    broken = tmp_path / "broken.safetensors"
    whole = files[0].read_bytes()
    for data in (b"", b"x" * 7, b"\xff" * 64, (9).to_bytes(8, "little") + b"not json!", whole[:-1]):
        broken.write_bytes(data)
        with pytest.raises(TransferError, match=r"no safetensors file|is cut off"):
            read_from([broken, files[1]], server(1)[0])
