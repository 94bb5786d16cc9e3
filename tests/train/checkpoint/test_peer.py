"""Copies in memory: real agents, real sockets; any layout reads what any other has written."""

import errno
import mmap
import multiprocessing
import os
import signal
import socket
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import ConfigError, DataError
from cairn.core.shared_secret import AuthenticationRefused, Secret
from cairn.train.checkpoint import peer_agent
from cairn.train.checkpoint.memory_checksums import word_sum
from cairn.train.checkpoint.peer_agent import Agent, Doors
from cairn.train.checkpoint.peer_link import Gone, Link, connect, payload
from cairn.train.checkpoint.peer_memory import PeerMemory
from cairn.train.checkpoint.peer_messages import Done, Fetch, Put, Sums, Written
from cairn.train.checkpoint.peer_pack import Table, entries_of, fill
from cairn.train.checkpoint.peer_placement import keepers, node_of, recovery_point, survives
from cairn.train.checkpoint.peer_readers import LEAST_BYTES, Mapped, PieceRead, shared_out
from cairn.train.checkpoint.peer_restore import Reach, ask_holdings, forget, recall_pieces
from cairn.train.checkpoint.peer_shard import Shard, mark
from cairn.train.checkpoint.piece import Piece, whole
from cairn.train.recovery.status_board import Board


class Nodes:
    """Agents in processes of their own."""

    def __init__(self, folder, count, world, secret=None):
        self.secret = secret
        self.board = Board(world, count)
        self.doors = [Doors.open(str(folder / f"n{node}")) for node in range(count)]
        self.keepers = keepers(list(range(count)))
        self.addresses = tuple(door.address for door in self.doors)
        self.processes = [None] * count
        self.peers = []
        for node in range(count):
            self.start(node)

    def start(self, node, secret=None):
        keeper = self.keepers[node]
        address = None if keeper is None else self.addresses[keeper]
        agent = Agent(node, self.doors[node], address, self.board, secret or self.secret)
        process = multiprocessing.get_context("fork").Process(target=agent.run, daemon=True)
        process.start()
        self.processes[node] = process

    def kill(self, node):
        self.processes[node].kill()
        self.processes[node].join()

    def peer(self, rank, world, generation=1):
        self.peers.append(
            PeerMemory(self.board, rank, world, self.reach(rank), generation, patience_s=0.3)
        )
        return self.peers[-1]

    def reach(self, node):
        return Reach(node, self.doors[node].path, self.addresses, self.secret)

    def holdings(self):
        return {
            node: ask_holdings(address, self.secret) for node, address in enumerate(self.addresses)
        }


@pytest.fixture
def nodes(tmp_path):
    made = []

    def make(count, world, secret=None):
        made.append(Nodes(tmp_path, count, world, secret))
        return made[-1]

    yield make
    for one in made:
        for peer in one.peers:
            peer.close()
        for node in range(len(one.processes)):
            one.kill(node)
        for doors in one.doors:
            doors.close()


def state(rank, step):
    """Pieces of one of two ranks that share a matrix by columns; and a vector that both hold."""
    matrix = torch.arange(24.0).view(4, 6) * step
    own = matrix[:, 3 * rank : 3 * rank + 3].clone()
    return {
        "model/w": Piece(own, (4, 6), (0, 3 * rank)),
        "model/b": whole(torch.full((5,), float(step))),
        "optim/n": whole(torch.tensor([step, rank])),
    }


def test_a_copy_survives_the_loss_of_its_node(nodes):
    net = nodes(2, 2)
    peers = [net.peer(r, 2) for r in range(2)]
    for step in (5, 10, 15):
        for rank, peer in enumerate(peers):
            assert peer.save(step, state(rank, step), {"step": step})
        assert peers[0].wait_until_safe(step)
    assert recovery_point(net.holdings(), 1, 2).step == 15
    net.kill(1)
    net.start(1)  # empty, at the same address
    point = recovery_point(net.holdings(), 1, 2)
    assert (point.step, [copy.nodes for copy in point.copies]) == (15, [(0,), (0,)])
    for rank in range(2):  # one maps its own node's memory, the other fetches over TCP
        room = {
            name: p._replace(tensor=torch.zeros_like(p.tensor))
            for name, p in state(rank, 15).items()
        }
        assert recall_pieces(point, net.reach(rank), rank, room) == {"step": 15}
        assert all(torch.equal(room[n].tensor, p.tensor) for n, p in state(rank, 15).items())
    whole_matrix = {"model/w": whole(torch.zeros(4, 6))}  # another layout: one rank holds all
    recall_pieces(point, net.reach(1), 0, whole_matrix)
    assert torch.equal(whole_matrix["model/w"].tensor, torch.arange(24.0).view(4, 6) * 15)


def odd_state(step):
    """Tensors that end in the middle of a line of memory."""
    return {f"model/{n}": whole(torch.full((70,), step + n, dtype=torch.uint8)) for n in range(3)}


def test_a_process_that_comes_back_writes_over_what_the_one_before_left(nodes):
    """Its description is shorter or longer, so its tensors begin elsewhere in the same memory."""
    net = nodes(2, 2)
    for life, words in enumerate(["x" * 400, "", "x" * 64]):
        peers = [net.peer(rank, 2) for rank in range(2)]
        for step in (10 * life + 2, 10 * life + 4):
            for peer in peers:
                assert peer.save(step, odd_state(step), {"words": words})
            assert peers[0].wait_until_safe(step)
        for peer in peers:
            peer.close()
        point = recovery_point(net.holdings(), 1, 2)
        assert point.step == 10 * life + 4
        copies = tuple(msgspec.structs.replace(c, nodes=(1 - c.rank,)) for c in point.copies)
        elsewhere = msgspec.structs.replace(point, copies=copies)  # over TCP, from the other node
        for rank in range(2):
            room = odd_state(0)
            recall_pieces(elsewhere, net.reach(rank), rank, room)
            for name, expected in odd_state(point.step).items():
                assert torch.equal(room[name].tensor, expected.tensor)


def test_the_last_step_that_all_have_is_never_overwritten(nodes):
    net = nodes(2, 2)
    peers = [net.peer(r, 2) for r in range(2)]
    for rank, peer in enumerate(peers):
        peer.save(5, state(rank, 5), {})
    assert peers[0].wait_until_safe(5)
    for step in (10, 15, 20):  # rank 1 does not follow: it is dying
        peers[0].save(step, state(0, step), {})
    assert recovery_point(net.holdings(), 1, 2).step == 5
    mine = {held.step for held in net.holdings()[0] if held.rank == 0}
    assert mine == {5, 20}  # a step that not all have makes room for the next
    for address in net.addresses:
        forget(address, 1, 5)
    assert {held.step for copies in net.holdings().values() for held in copies} == {5}


def test_a_rank_killed_while_it_copies_leaves_the_copy_before(nodes):
    net = nodes(2, 1)

    def half_a_copy():
        peer = net.peer(0, 1)
        peer.save(5, state(0, 5), {})
        peer.wait_until_safe(5)

        def killed(pieces):
            os.kill(os.getpid(), signal.SIGKILL)

        peer.save(10, state(0, 10), {}, inspect=killed)

    process = multiprocessing.get_context("fork").Process(target=half_a_copy)
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert recovery_point(net.holdings(), 1, 1).step == 5


def test_an_agent_that_dies_is_found_again_and_a_damaged_copy_is_refused(nodes):
    net = nodes(2, 1)
    peer = net.peer(0, 1)
    assert peer.save(5, state(0, 5), {})
    assert peer.wait_until_safe(5)
    net.kill(0)
    net.start(0)  # an empty one, at the same address
    assert peer.save(10, state(0, 10), {})
    assert peer.wait_until_safe(10)
    assert peer.save(15, state(0, 15), {})
    assert peer.wait_until_safe(15)
    point = recovery_point(net.holdings(), 1, 1)
    assert point.step == 15
    flip_a_bit(peer, 15, "model/w")
    with pytest.raises(DataError, match="its checksum differs"):
        recall_pieces(on_nodes(point, 0), net.reach(0), 0, state(0, 0))
    room = state(0, 0)
    recall_pieces(point, net.reach(0), 0, room)  # the other node's copy is as it was
    assert all(torch.equal(room[n].tensor, p.tensor) for n, p in state(0, 15).items())


class Runtime:
    """CUDA's calls that pin memory, as a driver would answer them."""

    class cudaError(int):
        success = 0

    def __init__(self, answer=0):
        self.answer, self.calls = self.cudaError(answer), []

    def cudaHostRegister(self, *args):
        self.calls.append(("register", *args))
        return self.answer

    def cudaHostUnregister(self, *args):
        self.calls.append(("unregister", *args))
        return self.cudaError(0)


def test_the_memory_of_copies_is_pinned_once_and_let_go_before_it_is_unmapped(nodes):
    net = nodes(2, 1)
    peer, driver = net.peer(0, 1), Runtime()
    assert peer.save(5, state(0, 5), {})
    assert peer.wait_until_safe(5)
    assert peer.home.pin(driver) is None
    [(_, address, size, flags)] = driver.calls
    assert (address % mmap.PAGESIZE, size, flags) == (0, 2 * peer.home.size, 0)
    for tensors in peer.home.tensors:
        assert all(address < tensor.data_ptr() < address + size for tensor in tensors.values())
    assert peer.save(10, state(0, 10), {})
    assert peer.wait_until_safe(10)
    assert len(driver.calls) == 1
    net.kill(0)
    net.start(0)  # another agent has other memory
    before = peer.home
    assert peer.save(15, state(0, 15), {})
    assert peer.home is not before
    assert driver.calls[1:] == [("unregister", address)]
    before.close()
    peer.close()
    assert len(driver.calls) == 2


def test_memory_that_the_driver_does_not_pin_is_used_as_it_is(nodes):
    net = nodes(2, 1)
    peer, driver = net.peer(0, 1), Runtime(answer=801)
    assert peer.save(5, state(0, 5), {})
    reason = peer.home.pin(driver)
    assert reason.startswith("the driver does not pin")
    assert reason.endswith("801")
    assert peer.save(10, state(0, 10), {})
    assert peer.wait_until_safe(10)
    peer.close()
    assert len(driver.calls) == 1


@pytest.mark.gpu
def test_a_gpu_copies_into_pinned_memory_and_reads_it_back(nodes):
    net, said = nodes(2, 1), []
    peer = net.peer(0, 1)
    peer.log_line = said.append
    for step in (5, 10, 15):
        on_gpu = {n: p._replace(tensor=p.tensor.cuda()) for n, p in state(0, step).items()}
        assert peer.save(step, on_gpu, {})
        assert peer.wait_until_safe(step)
    homes = peer.home.tensors[0]
    assert homes["model/w"].is_pinned()
    room = {n: p._replace(tensor=torch.zeros_like(p.tensor)) for n, p in on_gpu.items()}
    recall_pieces(recovery_point(net.holdings(), 1, 1), net.reach(0), 0, room)
    assert all(torch.equal(room[n].tensor, p.tensor) for n, p in on_gpu.items())
    peer.close()
    assert not homes["model/w"].is_pinned()
    assert said == []


@pytest.mark.gpu
def test_memory_that_cannot_be_pinned_disturbs_no_later_launch(nodes):
    net = nodes(2, 1)
    peer = net.peer(0, 1)
    assert peer.save(5, state(0, 5), {})
    cuda = torch.cuda.cudart()
    assert peer.home.pin(cuda) is None
    assert "does not pin" in peer.home.pin(cuda)  # it is pinned already
    assert torch.ones(3, device="cuda").sum().item() == 3


def flip_a_bit(peer, step, name):
    """In the memory of the rank's own node."""
    slot = 0 if peer.home.step(0) == step else 1
    peer.home.tensors[slot][name].view(-1).view(torch.int32)[0] ^= 1


def on_nodes(point, *nodes):
    """As if only these nodes had the copies."""
    copies = tuple(msgspec.structs.replace(copy, nodes=nodes) for copy in point.copies)
    return msgspec.structs.replace(point, copies=copies)


def test_damage_shows_also_to_a_layout_that_reads_a_part_and_only_where_it_is(nodes):
    """A rank of another layout wants some tensors of a copy, over TCP or mapped; each has a checksum of its own."""
    net = nodes(2, 2)
    peers = [net.peer(rank, 2) for rank in range(2)]
    for rank, peer in enumerate(peers):
        assert peer.save(5, state(rank, 5), {})
    assert peers[0].wait_until_safe(5)
    point = on_nodes(recovery_point(net.holdings(), 1, 2), 0)
    copy = next(one for one in point.copies if one.rank == 0)
    alone = msgspec.structs.replace(point, copies=(copy,))
    flip_a_bit(peers[0], 5, "optim/n")
    for node in range(2):  # mapped, and over TCP
        wanted = {"model/b": whole(torch.zeros(5))}
        recall_pieces(alone, net.reach(node), 0, wanted)
        assert torch.equal(wanted["model/b"].tensor, torch.full((5,), 5.0))
        cut = {"optim/n": Piece(torch.zeros(1, dtype=torch.int64), (2,), (0,))}
        with pytest.raises(DataError, match="its checksum differs"):
            recall_pieces(alone, net.reach(node), 0, cut)
        with pytest.raises(DataError, match="its checksum differs"):
            recall_pieces(alone, net.reach(node), 0, state(0, 0))


def test_a_copy_that_nobody_has_summed_yet_is_read_and_one_of_its_nodes_may_have_lost_it(nodes):
    """A rank that dies right after its copy, and a holder that dies before it is asked."""
    net = nodes(2, 1)
    peer = net.peer(0, 1)
    assert peer.save(5, state(0, 5), {})
    assert peer.wait_until_safe(5)
    point = recovery_point(net.holdings(), 1, 1)
    unsummed = msgspec.structs.replace(point.copies[0], check=0)
    net.kill(1)
    net.start(1)  # an empty one
    for copies in (point.copies, (unsummed,), (msgspec.structs.replace(unsummed, nodes=(1, 0)),)):
        room = state(0, 0)
        found = msgspec.structs.replace(point, copies=copies)
        recall_pieces(found, net.reach(0), 0, room)
        assert all(torch.equal(room[n].tensor, p.tensor) for n, p in state(0, 5).items())
    for node in range(2):  # over TCP, and where it should be mapped
        with pytest.raises(DataError, match="is gone: no copy of rank 0"):
            recall_pieces(on_nodes(point, 1), net.reach(node), 0, state(0, 0))


def test_copies_are_given_to_those_only_who_know_the_secret_of_the_job(nodes):
    ours, theirs = Secret.fresh(), Secret.fresh()
    net = nodes(2, 1, secret=ours)
    peer = net.peer(0, 1)
    assert peer.save(5, state(0, 5), {})
    assert peer.wait_until_safe(5)
    assert net.board.nodes["alone"].tolist() == [0, 0]  # the agents know each other
    point = recovery_point(net.holdings(), 1, 1)
    assert point.copies[0].nodes == (0, 1)
    room = state(0, 0)
    recall_pieces(on_nodes(point, 1), net.reach(0), 0, room)
    assert all(torch.equal(room[n].tensor, p.tensor) for n, p in state(0, 5).items())
    for stranger in (theirs, None):
        with pytest.raises(ConfigError, match=r"no copies can be read.*CAIRN_JOB_SECRET"):
            ask_holdings(net.addresses[1], stranger)
        reach = msgspec.structs.replace(net.reach(0), secret=stranger)
        with pytest.raises(AuthenticationRefused, match=net.addresses[1]):
            recall_pieces(on_nodes(point, 1), reach, 0, state(0, 0))
        forget(net.addresses[1], 99, 99, stranger)  # is not listened to
    assert len(net.holdings()[1]) == 1


def test_an_agent_of_another_job_takes_no_copy_and_training_goes_on_with_one(nodes):
    net = nodes(2, 1, secret=Secret.fresh())
    net.kill(1)
    net.start(1, secret=Secret.fresh())  # at the address of the one before
    peer = net.peer(0, 1)
    assert peer.save(5, state(0, 5), {})
    assert peer.wait_until_safe(5)
    assert net.board.nodes["alone"].tolist() == [1, 0]
    assert int(net.board.ranks["replicated"][0]) < 5  # nobody says that two nodes hold it


def test_a_connection_that_says_nothing_keeps_nobody_waiting(nodes):
    net = nodes(2, 1, secret=Secret.fresh())
    silent = []
    for address in net.addresses:
        host, _, port = address.rpartition(":")
        silent += [socket.create_connection((host, int(port))) for _ in range(3)]
    peer = net.peer(0, 1)
    assert peer.save(5, state(0, 5), {})
    assert peer.wait_until_safe(5)
    assert len(net.holdings()[1]) == 1
    for link in silent:
        link.close()


def test_a_sender_that_is_cut_off_keeps_the_room_of_a_copy_only_for_a_while(nodes, monkeypatch):
    monkeypatch.setattr(peer_agent, "PATIENCE_S", 0.4)
    net = nodes(2, 1)
    with connect(net.addresses[1], 5.0) as cut_off:
        announced = np.zeros(1 << 20, np.uint8)
        message = Put(1, 0, 5, len(announced), [0], [0], 1)
        cut_off.send(message, payload(memoryview(announced)[:0]))  # its bytes never come
        peer = net.peer(0, 1)
        assert peer.save(10, state(0, 10), {})
        assert peer.wait_until_safe(10)
        assert int(net.board.ranks["replicated"][0]) == 10


def test_an_agent_that_cannot_accept_for_a_moment_goes_on_listening(tmp_path):
    doors = Doors.open(str(tmp_path / "n0"))
    agent = Agent(0, doors, None, Board(1, 1))
    answers = iter([OSError(errno.EMFILE, "too many open files"), (None, ""), OSError("closed")])
    served = threading.Event()

    class Full:
        def accept(self):
            answer = next(answers)
            if isinstance(answer, OSError):
                raise answer
            return answer

        def fileno(self):
            return -1 if served.is_set() else 0

    def welcome(connection):
        served.set()

    agent._welcome = welcome
    agent._accept(Full())
    assert served.is_set()
    doors.close()


def test_an_open_door_to_the_network_needs_a_secret(tmp_path):
    doors = Doors.open(str(tmp_path / "n0"))._replace(address="10.0.0.1:99")
    with pytest.raises(ConfigError, match=r"would listen on 10\.0\.0\.1 without a secret"):
        Agent(0, doors, None, Board(1, 1))
    doors.close()


def test_a_large_copy_comes_over_several_lanes_and_its_damage_shows(nodes):
    """Tensors larger than a lane's share, a transposed one that cannot be received in place, and an empty one."""
    net = nodes(2, 1)
    torch.manual_seed(0)
    state = {
        "model/large": whole(torch.randn(1100, 1024)),
        "model/turned": whole(torch.randn(300, 700)),
        "model/none": whole(torch.empty(0, 3)),
        "optim/odd": whole(torch.randn(333).to(torch.bfloat16)),
    }
    peer = net.peer(0, 1)
    assert peer.save(5, state, {"n": 1})
    assert peer.wait_until_safe(5)
    point = recovery_point({1: net.holdings()[1]}, 1, 1)
    room = {name: p._replace(tensor=torch.zeros_like(p.tensor)) for name, p in state.items()}
    room["model/turned"] = whole(torch.zeros(700, 300).T)
    assert recall_pieces(point, net.reach(0), 0, room) == {"n": 1}
    assert all(torch.equal(room[name].tensor, p.tensor) for name, p in state.items())
    wrong = msgspec.structs.replace(point.copies[0], check=point.copies[0].check ^ 1)
    with pytest.raises(DataError, match="its checksum differs"):
        recall_pieces(msgspec.structs.replace(point, copies=(wrong,)), net.reach(0), 0, room)
    with pytest.raises(DataError, match="is gone"):
        recall_pieces(msgspec.structs.replace(point, step=6), net.reach(0), 0, room)


def test_another_node_of_this_machine_is_mapped_not_asked_over_the_network(nodes):
    net = nodes(2, 1)
    peer = net.peer(0, 1)
    assert peer.save(5, state(0, 5), {})
    assert peer.wait_until_safe(5)
    point = on_nodes(recovery_point(net.holdings(), 1, 1), 1)
    paths = tuple(doors.path for doors in net.doors)
    reach = msgspec.structs.replace(net.reach(0), addresses=("nowhere:1", "nowhere:1"), paths=paths)
    room = state(0, 0)
    recall_pieces(point, reach, 0, room)
    assert all(torch.equal(room[n].tensor, p.tensor) for n, p in state(0, 5).items())


def test_a_copy_that_is_overwritten_while_it_is_read_is_refused():
    content = np.arange(64, dtype=np.uint64)
    content[0] = 7
    room = np.zeros(32 * 8, np.uint8)
    wanted = [PieceRead(64, memoryview(room))]
    mapped = Mapped(content.view(np.uint8), 7, {})
    assert mapped.read(wanted) == {64: sum(range(8, 40))}
    assert room.tobytes() == content[8:40].tobytes()
    content[0] = 2**64 - 1  # what a writer does first
    with pytest.raises(Gone, match="overwritten"):
        mapped.read(wanted)


def test_a_copy_that_is_written_again_while_it_is_summed_gets_no_sums_of_both(
    tmp_path, monkeypatch
):
    """The copy behind it would be taken for damaged."""
    doors = Doors.open(str(tmp_path / "agent"))
    agent, shard = Agent(0, doors, None, Board(1, 1)), Shard(4096, 1)
    agent.own[1, 0] = shard
    written = Written(generation=1, rank=0, step=3, slot=0, used=64, cuts=[0])
    mark(shard.memory, 0, shard.size, 3)
    shard.sums[0] = Sums([0], [])

    def summed(view, cuts):
        mark(shard.memory, 0, shard.size, 5)  # the rank was faster
        return [17]

    monkeypatch.setattr(peer_agent, "part_sums", summed)
    agent._send_one(written, shard)
    assert shard.sums[0].sums == []
    assert int(agent.board.nodes["alone"][0]) == 0
    doors.close()
    shard.close()


def test_a_copy_is_sent_from_where_it_lies_also_when_its_shard_is_closed_meanwhile():
    shard = Shard(3000, world=1)
    content = np.random.default_rng(0).bytes(3000)
    shard.view(1, 3000)[:] = content
    sent = payload(shard.view(1, 3000), [(7, 2001), (0, 5), (2900, 100)])
    shard.close()
    here, there = (Link(end) for end in socket.socketpair())
    with here, there:
        here.send(Done(), sent)
        assert there.receive() == (Done(), 2106)
        rooms = [bytearray(2001), bytearray(5), bytearray(100)]
        there.receive_into([memoryview(room) for room in rooms])
        assert rooms == [content[7:2008], content[:5], content[2900:]]
        here.close()
        with pytest.raises(Gone, match="closed the connection"):
            there.receive()
    del sent
    shard.memory.close()  # nobody holds it any more
    with pytest.raises(ValueError, match="closed"):
        shard.view(1, 3000)


def test_what_is_no_message_is_refused():
    ours, theirs = socket.socketpair()
    with Link(theirs) as link, ours:
        ours.sendall(b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n")
        with pytest.raises(Gone, match="not of this protocol"):
            link.receive()


def test_what_is_overwritten_on_its_way_is_read_from_the_other_node(nodes, monkeypatch):
    """A rank writes over its copy before it is sent: the checksum shows it, and another node has the copy, too."""
    net = nodes(2, 2)
    peers = [net.peer(rank, 2) for rank in range(2)]
    for rank, peer in enumerate(peers):
        assert peer.save(5, state(rank, 5), {})
    assert peers[0].wait_until_safe(5)
    point = recovery_point(net.holdings(), 1, 2)
    assert point.copies[0].nodes == (0, 1)
    homes, overwritten = peers[0].home.tensors, []

    send = Link.send

    def late(link, message, *rest):
        asked = isinstance(message, Fetch) and message.stretches[0][1] == 4 * 3 * 4
        if asked and not overwritten:
            overwritten.append(max(homes, key=len)["model/w"].fill_(7.0))
        send(link, message, *rest)

    monkeypatch.setattr(Link, "send", late)
    away = Reach(2, "", net.addresses)  # a node that has neither copy
    room = {"model/w": Piece(torch.zeros(4, 3), (4, 6), (0, 0))}
    recall_pieces(point, away, 0, room)
    assert overwritten
    assert torch.equal(room["model/w"].tensor, state(0, 5)["model/w"].tensor)


def test_nobody_is_given_what_lies_outside_a_copy(nodes):
    net = nodes(1, 1)
    peer = net.peer(0, 1)
    assert peer.save(5, state(0, 5), {})
    with connect(net.addresses[0], 30.0) as link:
        for stretch in ((-8, 8), (0, peer.home.size + 1), (16, -8)):
            answer = link.ask(Fetch(1, 0, 5, [stretch]))
            assert answer == Done(False, "no copy of rank 0 at step 5")
        assert link.ask(Fetch(1, 0, 5, [(0, 8)])) == Done()
        step = bytearray(8)
        link.receive_into([memoryview(step)])
        assert int.from_bytes(step, "little") == 5


def test_copies_have_no_name_that_could_be_left_behind(nodes):
    net = nodes(1, 1)
    peer = net.peer(0, 1)
    assert peer.save(5, state(0, 5), {})
    assert "memfd:cairn-copies (deleted)" in Path("/proc/self/maps").read_text()


@st.composite
def cuts(draw):
    """A matrix cut into a grid by one layout and into another grid by the next."""
    shape = (draw(st.integers(1, 7)), draw(st.integers(1, 7)))

    def grid():
        edges = [
            sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape
        ]
        return [
            ((a, b), (c - a, d - b))
            for a, c in zip(edges[0], edges[0][1:], strict=False)
            for b, d in zip(edges[1], edges[1][1:], strict=False)
        ]

    return shape, grid(), grid()


@given(cuts())
def test_any_cut_is_read_from_any_other(cut):
    shape, written, wanted = cut
    matrix = torch.arange(float(shape[0] * shape[1])).view(shape)

    class Part:
        def __init__(self, at, size):
            self.part = matrix[at[0] : at[0] + size[0], at[1] : at[1] + size[1]]
            self.table = Table(entries_of({"w": Piece(self.part, shape, at)}), {}, 0)

        def read(self, entry):
            return self.part

        def read_into(self, rooms):
            for _, room in rooms:
                room.copy_(self.part)

    for at, size in wanted:
        room = torch.full(size, -1.0)
        fill({"w": Piece(room, shape, at)}, [Part(*one) for one in written])
        assert torch.equal(room, matrix[at[0] : at[0] + size[0], at[1] : at[1] + size[1]])
    if len(written) > 1:
        with pytest.raises(DataError, match="lack"):
            fill({"w": whole(torch.empty(shape))}, [Part(*one) for one in written[1:]])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_copies_go_to_another_failure_domain(domains):
    found = keepers(domains)
    for node, keeper in enumerate(found):
        if len(set(domains)) > 1:
            assert keeper is not None
            assert domains[keeper] != domains[node]
        elif len(domains) > 1:
            assert keeper is not None
            assert keeper != node
        else:
            assert keeper is None


def test_the_chance_to_survive_is_that_of_counting():
    """Every set of lost nodes, counted; and the figures of the paper."""
    from itertools import combinations

    for nodes, copies in ((6, 2), (8, 2), (9, 3)):
        for lost in range(nodes + 1):
            sets = list(combinations(range(nodes), lost))
            groups = [set(range(g, g + copies)) for g in range(0, nodes, copies)]
            fine = sum(not any(group <= set(one) for group in groups) for one in sets)
            assert survives(nodes, copies, lost) == pytest.approx(fine / len(sets))
    assert survives(16, 2, 2) == pytest.approx(0.933, abs=5e-4)
    assert survives(16, 2, 3) == pytest.approx(0.800, abs=5e-4)


def test_ranks_fill_the_nodes_evenly():
    assert [node_of(rank, 4, (0, 2)) for rank in range(4)] == [0, 0, 2, 2]


@given(st.binary(min_size=1, max_size=100), st.data())
def test_one_flipped_bit_always_shows(content, data):
    damaged = bytearray(content)
    damaged[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert word_sum(memoryview(content)) != word_sum(memoryview(bytes(damaged)))


@given(
    st.lists(st.integers(0, 5 << 20).map(lambda size: size // 8 * 8), max_size=6),
    st.integers(1, 5),
)
def test_lanes_share_every_byte_once_and_evenly(sizes, most):
    whole_copy = memoryview(bytes(sum(sizes)))
    begins = [sum(sizes[:n]) for n in range(len(sizes))]
    wanted = [
        PieceRead(begin, whole_copy[begin : begin + size])
        for begin, size in zip(begins, sizes, strict=True)
    ]
    loads = shared_out(wanted, most)
    assert sorted(piece.at for load in loads for piece in load) == sorted(begins)  # each once
    carried = [sum(len(piece.room) for piece in load) for load in loads]
    assert sum(carried) == sum(sizes)
    assert len(loads) <= max(1, min(most, sum(sizes) // LEAST_BYTES))
    # No lane has more than the lightest one and one stretch.
    assert max(carried) - min(carried) <= max(sizes, default=0)


def test_the_sum_is_of_64_bit_words():
    words = np.array([2**63, 2**63, 5], np.uint64)
    assert word_sum(memoryview(words.tobytes())) == 5
