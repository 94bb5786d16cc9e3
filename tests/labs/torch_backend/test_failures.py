"""What goes wrong between ranks: an error on every rank that is left, with operation, rank and reason, and no hang."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from multiprocessing.connection import wait
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cairn.comm.doctor.diagnose import diagnose
from cairn.core.client_authenticator import ClientAuthenticator
from cairn.core.errors import ConfigError
from cairn.core.shared_secret import AuthenticationRefused, Secret
from cairn.labs.torch_backend import (
    CommError,
    CommTimeout,
    GroupStopped,
    Options,
    RankLost,
    RankMismatch,
)
from cairn.labs.torch_backend.options import from_environment
from cairn.labs.torch_backend.rendezvous import COLLECTIVE, DIRECT, Entrance, _call

LARGE = 4_000_000  # elements: more than a connection holds
# Of a group that is to run into it: long enough for its ranks to meet on a busy machine.
TIMEOUT_S = 5
PATIENCE_S = 40  # of the test, on a busy machine; every timeout of a group here is far below it


def launch(
    world, function, *args, ranks=None, timeout_s=30.0, store=None, hosts=None, options=None
):
    """{rank: error or result}; a rank that was killed is missing. Nothing outlives the call."""
    context = multiprocessing.get_context("fork")
    pipes, processes = {}, []
    for place, rank in enumerate(ranks if ranks is not None else range(world)):
        receiver, sender = context.Pipe(duplex=False)
        settings = dict(options or {})
        if hosts:
            settings["host"] = f"host-{hosts[rank]}"
        worlds = world if isinstance(world, int) else world[place]
        arguments = (sender, store, rank, worlds, timeout_s, Options(**settings), function, args)
        process = context.Process(target=_rank, args=arguments, daemon=True)
        process.start()
        sender.close()
        pipes[receiver] = place
        processes.append(process)
    found, deadline = {}, time.monotonic() + PATIENCE_S
    try:
        while pipes:
            ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(pipes.values())} hang; the others: {found}"
            for pipe in ready:
                place = pipes.pop(pipe)
                try:
                    found[place] = pipe.recv()
                except EOFError:
                    processes[place].join(5)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def _rank(sender, store, rank, world, timeout_s, options, function, args):
    try:
        dist.init_process_group("cairn", init_method=f"file://{store}", rank=rank, world_size=world,
                                timeout=timedelta(seconds=timeout_s), pg_options=options)  # fmt: skip
        sender.send(function(rank, world, *args))
    except Exception as error:  # noqa: BLE001  it is what the test looks at
        sender.send(error)
    finally:
        sender.close()
        os._exit(0)


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def twice(rank, world, first):
    """The operation, and one more: a rank that only sends learns from the next that all is over."""
    first(rank, world)
    dist.barrier()
    return "done"


def sizes(rank, world):
    dist.all_reduce(torch.ones(10 + (rank == 1)))


def large_sizes(rank, world):
    dist.all_reduce(torch.ones(LARGE + 1000 * (rank == 1)))


def types(rank, world):
    dist.all_reduce(torch.ones(10, dtype=torch.int32 if rank == 1 else torch.float32))


def reductions(rank, world):
    dist.all_reduce(torch.ones(10), dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)


def operations(rank, world):
    x = torch.ones(10)
    if rank == 1:
        dist.all_gather([torch.empty(10) for _ in range(world)], x)
    else:
        dist.all_reduce(x)


def roots(rank, world):
    dist.broadcast(torch.ones(10), src=int(rank == 1))


def rows(rank, world):
    mine = [2] * world
    come = [2] * world
    if rank == 1:
        come[0] = 3
    dist.all_to_all_single(torch.empty(sum(come), 4), torch.ones(2 * world, 4), come, mine)


def message_sizes(rank, world):
    if rank == 0:
        dist.send(torch.ones(5), 1)
    if rank == 1:
        dist.recv(torch.ones(6), 0)


@pytest.mark.parametrize("hosts", [None, "011"], ids=["one-host", "two-hosts"])
@pytest.mark.parametrize(
    "wrong",
    [sizes, large_sizes, types, reductions, operations, roots, rows, message_sizes],
    ids=lambda f: f.__name__,
)
def test_ranks_that_disagree(store, wrong, hosts):
    found = launch(3, twice, wrong, store=store, hosts=hosts)
    assert len(found) == 3
    for error in found.values():
        assert isinstance(error, CommError), error
        assert not isinstance(error, CommTimeout), error
        assert "rank" in str(error)
        assert "#" in str(error) or "send" in str(error)
    assert any(isinstance(error, RankMismatch) for error in found.values())


def test_both_sides_are_named(store):
    found = launch(2, twice, types, store=store)
    text = " ".join(str(error) for error in found.values() if isinstance(error, RankMismatch))
    assert "all_reduce #1" in text
    assert "int32" in text
    assert "float32" in text


def killed_within(rank, world, operation):
    dist.barrier()
    x = torch.ones(LARGE)
    if rank == 1:
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    try:
        while time.monotonic() - began < PATIENCE_S:
            if operation == "send":
                peer = (rank + 1) % world
                works = [dist.isend(x, peer), dist.irecv(torch.empty_like(x), (rank - 1) % world)]
                for work in works:
                    work.wait()
            elif operation == "async":
                dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True).wait()
            else:
                dist.all_reduce(x, dist.ReduceOp.MAX)
    except CommError as error:
        try:
            dist.all_reduce(x)  # and a group that was stopped stays so
        except GroupStopped:
            return error
    return "went on"


def named_memory() -> set[str]:
    """Without the semaphores of Python's multiprocessing, which other tests make and remove meanwhile."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


@pytest.mark.parametrize(
    "hosts", [None, "012", "001"], ids=["one-host", "three-hosts", "two-hosts"]
)
@pytest.mark.parametrize("operation", ["now", "async", "send"])
def test_a_rank_is_killed_in_the_middle(store, operation, hosts):
    before = named_memory()
    found = launch(3, killed_within, operation, store=store, hosts=hosts)
    assert set(found) == {0, 2}
    assert all(isinstance(error, (RankLost, GroupStopped)) for error in found.values()), found
    text = " ".join(map(str, found.values()))
    assert "rank 1 has died" in text or "rank 1 has closed" in text
    assert named_memory() <= before  # memory without a name leaves none behind


def dies_before(rank, world):
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))
    return "done"


def test_a_rank_that_died_before(store):
    found = launch(3, dies_before, store=store)
    assert set(found) == {0, 1}
    assert all(isinstance(error, (RankLost, GroupStopped)) for error in found.values())
    assert all("rank 2" in str(error) for error in found.values())


def leaves(rank, world):
    if rank == 1:
        dist.destroy_process_group()
        time.sleep(2)  # alive, and gone from the group
        return "left"
    dist.all_reduce(torch.ones(4))
    return "done"


def test_a_rank_that_left(store):
    found = launch(2, leaves, store=store, ranks=[0, 1], timeout_s=20)
    assert isinstance(found[0], RankLost)
    assert "rank 1 has left the group" in str(found[0])


def late(rank, world, told):
    """Rank 1 comes when rank 0 has given up."""
    dist.barrier()
    if rank == 1:
        wait_until(told.exists)
    try:
        dist.all_reduce(torch.ones(4))
        dist.barrier()  # the late one may find everything there, sent before the others gave up
    finally:
        told.touch()
    return "done"


def wait_until(true):
    deadline = time.monotonic() + PATIENCE_S
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.parametrize("hosts", [None, "01"], ids=["one-host", "two-hosts"])
def test_a_rank_that_does_not_come(store, tmp_path, hosts):
    found = launch(2, late, tmp_path / "told", store=store, timeout_s=TIMEOUT_S, hosts=hosts)
    assert isinstance(found[0], CommTimeout)
    assert f"all_reduce #2: rank 0 waited {TIMEOUT_S} s for rank 1" in str(found[0])
    if hosts is None:
        assert "which has done barrier #1" in str(found[0])
    assert isinstance(found[1], CommError)


def own_timeout(rank, world):
    dist.barrier()
    if rank == 1:
        time.sleep(2)
        return "slept"
    y = torch.empty(4)
    dist.irecv(y, 1).wait(timedelta(seconds=0.3))
    return "received"


def test_a_wait_of_its_own_length(store):
    found = launch(2, own_timeout, store=store)
    assert isinstance(found[0], CommTimeout)
    assert "recv from rank 1 is not done after 0.3 s" in str(found[0])


def nothing(rank, world):
    return "joined"


def test_a_rank_that_never_joins(store):
    found = launch(3, nothing, store=store, ranks=[0, 1], timeout_s=TIMEOUT_S)
    for error in found.values():
        assert isinstance(error, CommError)
        assert "rank 2 of 3 to join" in str(error)


def test_another_world_size(store):
    found = launch([2, 3], nothing, store=store, ranks=[0, 1], timeout_s=20)
    for error in found.values():
        assert isinstance(error, CommError)
        assert "a world of" in str(error)


def test_two_processes_of_one_rank(store):
    found = launch(2, nothing, store=store, ranks=[0, 0], timeout_s=20)
    assert all(isinstance(error, CommError) for error in found.values())
    assert any("two processes are rank 0" in str(error) for error in found.values())


def test_other_settings(store):
    def differ(rank):
        return {"deterministic": rank == 1}

    context = multiprocessing.get_context("fork")
    found = []
    for rank in range(2):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, store, rank, 2, 10.0, Options(**differ(rank)), nothing, ())
        process = context.Process(target=_rank, args=arguments, daemon=True)
        process.start()
        found.append((receiver, process))
    errors = [receiver.recv() for receiver, _ in found]
    for _, process in found:
        process.join()
    assert all("deterministic=True" in str(error) for error in errors)


def test_a_port_that_is_taken(store):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = {"port": server.getsockname()[1]}
        found = launch(2, nothing, store=store, hosts="01", options=taken, timeout_s=20)
    for error in found.values():
        assert isinstance(error, CommError)
        assert "cannot listen on 127.0.0.1 port" in str(error)
        assert "rank" in str(error)


def test_strangers_at_a_rank_keep_nobody_waiting_and_join_nothing():
    """One says nothing, one has another secret; the rank that is waited for comes after them."""
    ours = Secret.fresh()
    room = SimpleNamespace(rank=3, deadline=time.monotonic() + PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
        entrance = Entrance(server, ClientAuthenticator(ours, "rank 0"))
        with socket.create_connection(where):
            with pytest.raises(AuthenticationRefused, match="our secret is not the one it knows"):
                _call(room, where, COLLECTIVE, Secret.fresh())
            with _call(room, where, DIRECT, ours):
                purpose, rank, connection = entrance.arrived.get()
                connection.close()
        assert (purpose, rank) == (DIRECT, 3)
        assert entrance.arrived.empty()
        entrance.close()


def test_settings_from_the_environment():
    chosen = from_environment(
        {"CAIRN_COMM_DETERMINISTIC": "1", "CAIRN_COMM_TCP_GBIT": "100", "HOME": "/"}
    )
    assert chosen == Options(deterministic=True, tcp_gbit=100)
    for name, text in (("PORT", "x"), ("TCP_GBIT", "-1"), ("PIECE", "10"), ("PORT", "70000")):
        with pytest.raises(ConfigError):
            from_environment({f"CAIRN_COMM_{name}": text})
    with pytest.raises(ConfigError, match=r"no schedule .rign.*did you mean .ring."):
        from_environment({"CAIRN_COMM_SCHEDULE": "rign"})
    with pytest.raises(ConfigError, match="CAIRN_COMM_DETERMINISTC is no setting"):
        from_environment({"CAIRN_COMM_DETERMINISTC": "1"})
    assert from_environment({"CAIRN_COMM_BENCH_RANKS": "4"}) == Options()  # of a verb


def away(rank, world, told):
    """Rank 1 comes after the others have given up, and learns why."""
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        wait_until(told.exists)
    try:
        dist.all_reduce(torch.ones(7))
    finally:
        told.touch()


def test_dumps_of_a_group_that_failed_name_who_was_missing(store, tmp_path):
    prefix = tmp_path / "dumps" / "flight_"
    told = tmp_path / "told"
    found = launch(3, away, told, store=store, timeout_s=TIMEOUT_S, options={"dump": str(prefix)})
    assert all(isinstance(error, CommError) for error in found.values())
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        f"flight_{r}" for r in range(3)
    ]
    (finding,) = diagnose([prefix.parent]).findings
    assert (finding.cause, finding.where) == ("hang", "rank 1")
    assert "ranks 0, 2 wait in all_reduce #2" in finding.evidence[0]
    assert "rank 1 ends with all_reduce #1" in finding.evidence[1]
    assert "test_failures.py" in finding.evidence[2]  # the line that waits


def test_a_dump_that_cannot_be_written_hides_nothing(store):
    found = launch(2, sizes, store=store, options={"dump": "/proc/nowhere/flight_"})
    assert all("all_reduce #1" in str(error) for error in found.values())
