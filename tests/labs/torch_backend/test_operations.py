"""Every operation against gloo, with sizes, types and orders at random, on two, three and four ranks."""

import random

import pytest
import torch
import torch.distributed as dist
from forked import run_ranks

import cairn.labs.torch_backend
from cairn.labs.torch_backend import Options, executor
from cairn.labs.torch_backend.program import program_of
from cairn.labs.torch_backend.wire import Call

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.uint8]
REDUCTIONS = [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
SIZES = [1, 2, 3, 17, 1000, 4099, 40_000]
SMALL = Options(piece=1024, places=2)  # so that everything is cut into many pieces
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def tensor(draw: random.Random, rank: int, dtype: torch.dtype, size: int) -> torch.Tensor:
    """Whole numbers, so small that sums and products of four are exact in every type."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30) + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()
    low = 0 if dtype == torch.uint8 else -3
    return torch.randint(low, 4, (size,), generator=generator).to(dtype)


def same(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine, theirs), (mine.flatten()[:5], theirs.flatten()[:5])


def all_reduce(draw, rank, world, ours):
    dtype = draw.choice(FLOATS + INTEGERS)
    x = tensor(draw, rank, dtype, draw.choice(SIZES))
    op = draw.choice(REDUCTIONS)
    y = x.clone()
    dist.all_reduce(x, op, group=ours)
    dist.all_reduce(y, op)
    same(x, y)


def average(draw, rank, world, ours):
    x = tensor(draw, rank, torch.float32, draw.choice(SIZES))
    y = x.clone()
    work = dist.all_reduce(x, dist.ReduceOp.AVG, group=ours, async_op=True)
    dist.all_reduce(y)
    work.wait()
    assert work.is_completed()
    same(x, y / world)


def bits_and_booleans(draw, rank, world, ours):
    x = tensor(draw, rank, torch.int64, 33) + 5
    y = x.clone()
    op = draw.choice([dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR])
    dist.all_reduce(x, op, group=ours)
    dist.all_reduce(y, op)
    same(x, y)
    flag = tensor(draw, rank, torch.bool, 9)
    count = flag.int()
    dist.all_reduce(flag, group=ours)
    dist.all_reduce(count)
    same(flag, count > 0)


def not_contiguous(draw, rank, world, ours):
    x = tensor(draw, rank, torch.float32, 60).view(6, 10).T
    y = x.contiguous()
    dist.all_reduce(x, group=ours)
    dist.all_reduce(y)
    same(x.contiguous(), y)
    dist.broadcast(x, world - 1, group=ours)
    dist.broadcast(y, world - 1)
    same(x.contiguous(), y)


def broadcast_and_reduce(draw, rank, world, ours):
    dtype, root = draw.choice([*FLOATS, *INTEGERS]), draw.randrange(world)
    x = tensor(draw, rank, dtype, draw.choice(SIZES))
    y = x.clone()
    dist.broadcast(x, root, group=ours)
    dist.broadcast(y, root)
    same(x, y)
    x, op = tensor(draw, rank, dtype, draw.choice(SIZES)), draw.choice(REDUCTIONS)
    y, before = x.clone(), x.clone()
    dist.reduce(x, root, op, group=ours)
    dist.reduce(y, root, op)
    same(x, y if rank == root else before)


def all_gather(draw, rank, world, ours):
    dtype, size = draw.choice([*FLOATS, *INTEGERS, torch.bool]), draw.choice(SIZES)
    x = tensor(draw, rank, dtype, size)
    mine, theirs = ([torch.empty_like(x) for _ in range(world)] for _ in range(2))
    dist.all_gather(mine, x, group=ours)
    dist.all_gather(theirs, x)
    for a, b in zip(mine, theirs, strict=True):
        same(a, b)
    whole = torch.empty(world * size, dtype=dtype)
    dist.all_gather_into_tensor(whole, x, group=ours)
    same(whole, torch.cat(theirs))


def uneven_all_gather(draw, rank, world, ours):
    sizes = [draw.randrange(5) for _ in range(world)]
    parts = [torch.empty(size, dtype=torch.int64) for size in sizes]
    dist.all_gather(parts, torch.full((sizes[rank],), rank), group=ours)
    for other, part in enumerate(parts):
        assert part.tolist() == [other] * sizes[other]


def reduce_scatter(draw, rank, world, ours):
    dtype, size = draw.choice(FLOATS + INTEGERS), draw.choice(SIZES)
    op = draw.choice(REDUCTIONS)
    whole = tensor(draw, rank, dtype, size * world)
    summed, before, out = whole.clone(), whole.clone(), torch.empty(size, dtype=dtype)
    dist.all_reduce(summed, op)
    dist.reduce_scatter_tensor(out, whole, op, group=ours)
    same(out, summed[rank * size : (rank + 1) * size])
    same(whole, before)
    out.zero_()
    dist.reduce_scatter(out, list(whole.split(size)), op, group=ours)
    same(out, summed[rank * size : (rank + 1) * size])


def all_to_all(draw, rank, world, ours):
    table = [[draw.randrange(4) for _ in range(world)] for _ in range(world)]
    width, dtype = (
        draw.choice([1, 3, 700]),
        draw.choice([torch.float32, torch.int64, torch.bfloat16]),
    )
    sent, come = table[rank], [row[rank] for row in table]
    x = tensor(draw, rank, dtype, sum(sent) * width).view(sum(sent), width)
    y, z = torch.empty(sum(come), width, dtype=dtype), torch.empty(sum(come), width, dtype=dtype)
    dist.all_to_all_single(y, x, come, sent, group=ours)
    dist.all_to_all_single(z, x, come, sent)
    same(y, z)
    even = tensor(draw, rank, dtype, world * width)
    y, z = torch.empty_like(even), torch.empty_like(even)
    dist.all_to_all_single(y, even, group=ours)
    dist.all_to_all_single(z, even)
    same(y, z)
    parts = [torch.empty(width, dtype=dtype) for _ in range(world)]
    dist.all_to_all(parts, list(even.split(width)), group=ours)
    same(torch.cat(parts), z)


def gather_and_scatter(draw, rank, world, ours):
    dtype, size, root = draw.choice(FLOATS + INTEGERS), draw.choice(SIZES), draw.randrange(world)
    x = tensor(draw, rank, dtype, size)
    parts = [torch.empty_like(x) for _ in range(world)] if rank == root else None
    whole = [torch.empty_like(x) for _ in range(world)]
    dist.gather(x, parts, root, group=ours)
    dist.all_gather(whole, x)
    if parts is not None:
        for a, b in zip(parts, whole, strict=True):
            same(a, b)
    y = torch.empty_like(x)
    dist.scatter(y, whole if rank == root else None, root, group=ours)
    same(y, whole[rank])


def send_and_receive(draw, rank, world, ours):
    """Everybody sends to everybody before receiving anything, and receives in another order of tags."""
    size = draw.choice(SIZES)
    out = {
        (peer, tag): torch.full((size,), 100.0 * rank + 10 * peer + tag)
        for peer in range(world)
        for tag in (1, 2)
    }
    work = [
        dist.isend(x, peer, group=ours, tag=tag) for (peer, tag), x in out.items() if peer != rank
    ]
    for tag in (2, 1):
        for peer in range(world):
            if peer != rank:
                y = torch.empty(size)
                dist.recv(y, peer, group=ours, tag=tag)
                assert (y == 100.0 * peer + 10 * rank + tag).all()
    for one in work:
        one.wait()


def batched(draw, rank, world, ours):
    right, left = (rank + 1) % world, (rank - 1) % world
    x, y = torch.full((5,), float(rank)), torch.empty(5)
    ops = [dist.P2POp(dist.isend, x, right, ours), dist.P2POp(dist.irecv, y, left, ours)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert (y == left).all()


def objects(draw, rank, world, ours):
    got = [None] * world
    dist.all_gather_object(got, {"rank": rank}, group=ours)
    assert [one["rank"] for one in got] == list(range(world))
    box = [rank] if rank == 1 else [None]
    dist.broadcast_object_list(box, 1, group=ours)
    assert box == [1]


def many_at_once(draw, rank, world, ours):
    tensors = [torch.full((size,), float(rank)) for size in (1, 50, 3000)]
    works = [dist.all_reduce(x, group=ours, async_op=True) for x in tensors]
    dist.barrier(group=ours)
    future = works[-1].get_future().then(lambda f: f.value()[0].sum().item())
    for work in works:
        work.wait()
    wanted = world * (world - 1) / 2
    assert future.wait() == wanted * 3000
    for x in tensors:
        assert (x == wanted).all()


def coalesced(draw, rank, world, ours):
    tensors = [torch.full((size,), float(rank)) for size in (4, 9)]
    with dist._coalescing_manager(group=ours, async_ops=True) as manager:
        for x in tensors:
            dist.all_reduce(x, group=ours)
    manager.wait()
    dist.all_reduce_coalesced(tensors, group=ours)
    for x in tensors:
        assert (x == world * world * (world - 1) / 2).all()


EVERY = [all_reduce, average, bits_and_booleans, not_contiguous, broadcast_and_reduce, all_gather, uneven_all_gather,
         reduce_scatter, all_to_all, gather_and_scatter, send_and_receive, batched, objects, many_at_once,
         coalesced]  # fmt: skip


def against_gloo(rank, world, seed, options, rounds):
    ours = dist.new_group(backend="cairn", pg_options=options)
    draw = random.Random(seed)
    for _ in range(rounds):
        for check in draw.sample(EVERY, len(EVERY)):
            check(draw, rank, world, ours)
    return ours.collectives.sequence


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("options", [None, SMALL], ids=["default", "small-pieces"])
def test_against_gloo(world, options):
    done = run_ranks(world, against_gloo, world, options, 3)
    assert len(set(done)) == 1


def over_tcp(rank, world, hosts, options):
    """Ranks that say they are on different hosts: sockets between them, shared memory within."""
    return against_gloo(rank, world, 5, Options(host=f"host-{hosts[rank]}", **options), 2)


@pytest.mark.parametrize("hosts", ["01", "012", "0101", "0011", "0001"])
def test_between_hosts(hosts):
    run_ranks(len(hosts), over_tcp, hosts, {"tcp_gbit": 1.0})


def every_schedule(rank, world, hosts):
    from cairn.labs.torch_backend.choice import CANDIDATES

    for collective, names in CANDIDATES.items():
        for name in names:
            if name == "two_level" and hosts != "0011":
                continue
            settings = Options(host=f"host-{hosts[rank]}", schedule=name)
            ours = dist.new_group(backend="cairn", pg_options=settings)
            checks = {
                "all_reduce": all_reduce,
                "all_gather": all_gather,
                "reduce_scatter": reduce_scatter,
                "all_to_all": all_to_all,
                "broadcast": broadcast_and_reduce,
                "reduce": broadcast_and_reduce,
            }
            for seed in range(3):
                checks[collective](random.Random(seed), rank, world, ours)
            dist.destroy_process_group(ours)


@pytest.mark.parametrize("hosts", ["000", "0011"])
def test_every_schedule_can_be_forced(hosts):
    run_ranks(len(hosts), every_schedule, hosts)


def in_rank_order(rank, world):
    ours = dist.new_group(backend="cairn", pg_options=Options(deterministic=True))
    results = []
    for size in (5, 1000, 30_000):
        everybody = [
            torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(world)
        ]
        wanted = everybody[0].clone()
        for other in everybody[1:]:
            wanted += other
        x = everybody[rank].clone()
        dist.all_reduce(x, group=ours)
        results.append(torch.equal(x, wanted))
        share = size // world
        out = torch.empty(share)
        dist.reduce_scatter_tensor(out, everybody[rank][: share * world], group=ours)
        results.append(torch.equal(out, wanted[rank * share : (rank + 1) * share]))
    return results


@pytest.mark.parametrize("world", [3, 4])
def test_deterministic_is_the_order_of_the_ranks_to_the_bit(world):
    for results in run_ranks(world, in_rank_order):
        assert all(results)


def sub_groups(rank, world):
    """Groups of their own, at once, and in other orders than the world's."""
    pairs = [dist.new_group([0, 2], backend="cairn"), dist.new_group([1, 3], backend="cairn")]
    mine = pairs[rank % 2]
    x = torch.full((1000,), float(rank))
    dist.all_reduce(x, group=mine)
    assert (x == (2 if rank % 2 == 0 else 4)).all()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    y = torch.full((3,), float(rank))
    dist.all_reduce(y, group=mesh["b"].get_group())
    assert (y == (1 if rank < 2 else 5)).all()
    return mesh["b"].get_group().name()


def test_groups_within_the_world():
    assert run_ranks(4, sub_groups, backend="cairn") == ["cairn"] * 4


def refusals(rank, world):
    group = dist.group.WORLD
    seen = []
    for what in (
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.AVG),
        lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND),
        lambda: dist.all_gather_into_tensor(torch.empty(3), torch.ones(3)),
        lambda: group.send([torch.ones(1)], 7, 0),
        lambda: dist.all_to_all_single(torch.empty(5), torch.ones(5)),
        lambda: group.recv_anysource([torch.ones(1)], 0),
    ):
        try:
            what()
        except cairn.labs.torch_backend.CommError as error:
            seen.append(str(error))
    x = torch.ones(1)
    dist.all_reduce(x)  # a mistake that all make alike, before anything was sent, costs nothing
    return seen, x.item()


def test_what_cannot_be_done_is_refused_at_once():
    for seen, total in run_ranks(2, refusals, backend="cairn"):
        assert len(seen) == 6
        assert total == 2
        assert "no avg of torch.int64" in seen[0]


def exchange(rank, world, options, size, times):
    """Each holds back what it has not sent yet; whoever waits for room must still take what has come."""
    ours = dist.new_group(backend="cairn", pg_options=Options(schedule="one_shot", **options(rank)))
    for number in range(times):
        x = torch.arange(float(size + 7 * number)) + rank
        dist.all_reduce(x, group=ours)
        assert torch.equal(x, 2 * torch.arange(float(len(x))) + 1)


@pytest.mark.parametrize(
    ("options", "size", "times"),
    [
        (lambda rank: {"piece": 1024, "places": 2}, 5000, 200),
        (lambda rank: {"host": f"host-{rank}"}, 2_000_000, 6),
    ],
    ids=["memory", "tcp"],
)
def test_two_that_exchange_more_than_their_connection_holds(options, size, times):
    run_ranks(2, exchange, options, size, times)


class Crossing:
    """Nothing has come when it is first asked; then both ends fill the connection at the same moment."""

    def __init__(self):
        self.pushes = self.pulls = self.naps = 0

    def push(self, stream):
        self.pushes += 1
        full = self.pushes > 2 and self.pulls < 2
        stream.at = stream.at if full else min(stream.at + 4, stream.view.numel())
        return not full

    def pull(self, stream):
        self.pulls += 1
        stream.at = stream.view.numel() if self.pulls > 1 else 0
        return self.pulls > 1

    def ready(self):
        return self.pulls > 0

    def lost(self):
        return None

    def sleep_for_room(self, seconds):
        self.naps += 1
        assert self.naps < 5, "waits for room, and takes nothing"

    sleep = sleep_for_room


class Nobody:
    name = 0

    def look(self, *about, **more):
        pass


def test_two_that_filled_their_connection_at_once_take_from_it(monkeypatch):
    monkeypatch.setattr(executor, "PUMP_S", -1.0)
    link, program = Crossing(), program_of("all_reduce", "one_shot", 2, 0)
    one = executor.Executor({1: link}, [0, 1], [0, 1], Nobody(), 0.0)
    one.run(Call("all_reduce", 1, torch.float32, "sum"), program, [torch.ones(12)], torch.add, 9.0)
    assert link.pulls == 2
