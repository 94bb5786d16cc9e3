"""Every schedule is proved for every number of ranks, and does on real arrays what mathematics says."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.comm.schedule.catalogue import make, names
from cairn.comm.schedule.interpret import REDUCTIONS, interpret
from cairn.comm.schedule.ops import ScheduleError
from cairn.comm.schedule.sparse import example_blocks
from cairn.comm.schedule.tree import TOP, depths, double_tree_parents
from cairn.comm.schedule.verify import verify, verify_all

ALL = names()
SIZES = [2, 3, 4, 5, 7, 8, 12, 16, 17, 31, 32, 33, 64]


def at_random(seed: int):
    rng = np.random.default_rng(seed)
    return lambda threads: int(rng.integers(threads))


def log2_up(n: int) -> int:
    return max(n - 1, 0).bit_length()


@pytest.mark.parametrize(("collective", "name"), ALL)
def test_it_is_proved_for_every_number_of_ranks(collective, name):
    proofs = verify_all([make(collective, name, n) for n in (*range(1, 34), 48, 63, 64)])
    proofs += verify_all([make(collective, name, n) for n in (128, 257)])
    assert [(proof.ranks, proof.problem) for proof in proofs if not proof.ok] == []
    assert {proof.capacity for proof in proofs} == {1}  # one chunk for each connection is enough
    assert all(proof.times_bound >= 1 - 1e-9 for proof in proofs)


# Steps one after another and vectors through the busiest rank, from the literature.
CLOSED_FORMS = {
    ("all_reduce", "ring"): lambda n: (2 * (n - 1), 2 * (n - 1) / n),
    ("all_reduce", "two_shot"): lambda n: (2, 2 * (n - 1) / n),
    ("all_reduce", "one_shot"): lambda n: (1, n - 1),
    ("all_reduce", "bruck"): lambda n: (2 * log2_up(n), 2 * (n - 1) / n),
    ("all_reduce", "pat"): lambda n: (2 * log2_up(n), 2 * (n - 1) / n),
    ("all_gather", "ring"): lambda n: (n - 1, (n - 1) / n),
    ("all_gather", "direct"): lambda n: (1, (n - 1) / n),
    ("all_gather", "bruck"): lambda n: (log2_up(n), (n - 1) / n),
    ("all_gather", "pat"): lambda n: (log2_up(n), (n - 1) / n),
    ("reduce_scatter", "ring"): lambda n: (n - 1, (n - 1) / n),
    ("reduce_scatter", "pat"): lambda n: (log2_up(n), (n - 1) / n),
    ("all_to_all", "pairwise"): lambda n: (n - 1, (n - 1) / n),
    ("all_to_all", "bruck"): lambda n: (
        log2_up(n),
        sum(i.bit_count() for i in range(n)) / n,  # once for each bit of the distance
    ),
    ("broadcast", "binomial"): lambda n: (
        max(i.bit_count() for i in range(n)),  # the longest way; the root does not wait for it
        log2_up(n),
    ),
    ("broadcast", "chain"): lambda n: (n - 2 + 4, 1),  # pipelined over 4 chunks
    ("reduce", "chain"): lambda n: (n - 2 + 4, 1),
}


@pytest.mark.parametrize(("collective", "name"), CLOSED_FORMS)
def test_steps_and_bytes_are_those_of_the_literature(collective, name):
    for n, proof in zip(SIZES, verify_all([make(collective, name, n) for n in SIZES]), strict=True):
        steps, traffic = CLOSED_FORMS[collective, name](n)
        assert (n, proof.steps, proof.traffic) == (n, steps, pytest.approx(traffic))


def test_halving_doubling_is_optimal_for_powers_of_two_and_folds_otherwise():
    for n in SIZES:
        proof = verify(make("all_reduce", "halving_doubling", n))
        power = 1 << (n.bit_length() - 1)
        fold = n != power
        assert proof.steps == 2 * int(math.log2(power)) + 2 * fold
        assert proof.traffic == pytest.approx(2 * (power - 1) / power + fold)


@pytest.mark.parametrize("n", [2, 3, 8, 13, 14, 64, 257])
def test_no_rank_is_inner_in_both_trees(n):
    trees = double_tree_parents(n)
    for parents in trees:
        assert (parents == TOP).sum() == 1
        assert depths(parents).max() <= log2_up(n)
        assert np.bincount(parents[parents != TOP]).max() <= 2
    inner = [set(parents[parents != TOP]) for parents in trees]
    roots = {int(np.flatnonzero(parents == TOP)[0]) for parents in trees}
    assert inner[0] & inner[1] <= roots
    proof = verify(make("all_reduce", "tree", n, chunks=16))
    assert proof.traffic <= 2.0  # a single binary tree would need 3


def test_a_pipelined_tree_takes_a_step_for_each_chunk_beyond_its_depth():
    few, many = (verify(make("all_reduce", "tree", 64, chunks=c)).steps for c in (8, 40))
    assert many - few == 16  # two trees share the 32 chunks more


@pytest.mark.parametrize("n", [4, 7, 16, 33])
def test_pat_goes_from_logarithmic_to_linear_as_its_buffer_shrinks(n):
    steps = [verify(make("all_gather", "pat", n, aggregate=limit)).steps for limit in (n, 4, 2, 1)]
    assert steps[0] == log2_up(n)
    assert steps[-1] == n - 1
    assert steps == sorted(steps)


def test_two_levels_carry_only_a_share_over_the_slow_network():
    gpus, nodes = 4, 3
    schedule = make("all_reduce", "two_level", gpus * nodes, gpus=gpus)
    sends = schedule.ops.kind == 0
    crossing = sends & (schedule.ops.rank // gpus != schedule.ops.peer // gpus)
    per_rank = np.bincount(schedule.ops.rank[crossing], minlength=12) / schedule.chunks
    assert per_rank == pytest.approx(2 * (nodes - 1) / nodes / gpus)
    same_rail = schedule.ops.rank[crossing] % gpus == schedule.ops.peer[crossing] % gpus
    assert same_rail.all()


def test_two_hops_need_fewer_messages_over_the_slow_network():
    proof = verify(make("all_to_all", "two_hop", 32, gpus=8))
    assert proof.messages == 3 + 7
    assert verify(make("all_to_all", "pairwise", 32)).messages == 31


def test_a_switch_halves_the_bytes_of_a_ring():
    ring, switch = (verify(make("all_reduce", name, 64)) for name in ("ring", "switch"))
    assert (ring.traffic, switch.traffic) == (pytest.approx(2 * 63 / 64), 1.0)
    for pool in (1, 3, 9):
        assert verify(make("all_reduce", "switch", 5, chunks=7, pool=pool)).ok


@pytest.mark.parametrize("density", [0.0, 0.05, 0.5, 1.0])
def test_sparse_blocks_cost_what_is_there(density):
    present = example_blocks(8, 160, density)
    proof = verify(make("all_reduce", "sparse", 8, present=present))
    assert proof.ok
    dense = 2 * 7 / 8
    if density == 0:
        assert proof.traffic == 0
    if density == 1:
        assert proof.traffic == pytest.approx(dense)
    assert proof.bound <= proof.traffic <= dense + 1e-9


def expected(collective, inputs, reduction, root):
    """What every rank must have, straight from the definition."""
    reduced = REDUCTIONS[reduction].reduce(np.stack(inputs))
    n = len(inputs)
    match collective:
        case "all_reduce":
            return [reduced] * n
        case "reduce":
            return [reduced if rank == root else None for rank in range(n)]
        case "reduce_scatter":
            return np.split(reduced, n)
        case "all_gather":
            return [np.concatenate(inputs)] * n
        case "broadcast":
            return [inputs[root]] * n
        case "all_to_all":
            return [np.concatenate([np.split(v, n)[rank] for v in inputs]) for rank in range(n)]
    raise AssertionError(collective)


@pytest.mark.parametrize(("collective", "name"), ALL)
@settings(max_examples=10)
@given(data=st.data())
def test_it_does_on_arrays_what_the_definition_says(collective, name, data):
    n = data.draw(st.integers(1, 17), label="ranks")
    parts = data.draw(st.integers(1, 3), label="parts")
    channels = data.draw(st.integers(1, parts), label="channels")
    chunks = data.draw(st.integers(1, 5), label="chunks")
    root = data.draw(st.integers(0, n - 1), label="root")
    reduction = data.draw(st.sampled_from(sorted(REDUCTIONS)), label="reduction")
    capacity = data.draw(st.integers(1, 3), label="capacity")
    rng = np.random.default_rng(data.draw(st.integers(0, 999), label="seed"))
    schedule = make(
        collective, name, n, parts=parts, channels=channels, chunks=chunks, root=root,
        aggregate=data.draw(st.sampled_from([None, 1, 2, 5])),
        pool=data.draw(st.integers(1, 6)),
    )  # fmt: skip
    assert verify(schedule).problem is None
    shared = collective in ("all_gather", "reduce_scatter", "all_to_all")
    size = schedule.chunks * 2 if shared else data.draw(st.integers(0, 23), label="size")
    size = size // n if collective == "all_gather" else size
    inputs = [rng.integers(-9, 9, size) for _ in range(n)]
    if schedule.present is not None:
        width = -(-size // schedule.chunks)
        for vector, row in zip(inputs, schedule.present, strict=True):
            vector *= np.repeat(row, width)[:size]
        reduction = "sum"  # what is absent is zero, which only a sum may leave out
    got = interpret(schedule, inputs, reduction, capacity, turn=lambda k: int(rng.integers(k)))
    for mine, wanted in zip(got, expected(collective, inputs, reduction, root), strict=True):
        if wanted is not None:
            assert mine.tolist() == wanted.tolist()


@pytest.mark.parametrize("name", [name for collective, name in ALL if collective == "all_reduce"])
def test_floats_are_the_same_bits_in_every_order_and_on_every_rank(name):
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(40).astype(np.float32) for _ in range(6)]
    schedule = make("all_reduce", name, 6, present=np.ones((6, 12), dtype=bool))
    first = interpret(schedule, inputs)
    assert len({vector.tobytes() for vector in first}) == 1
    for seed in range(5):
        again = interpret(schedule, inputs, capacity=1 + seed, turn=at_random(seed))
        assert [vector.tobytes() for vector in again] == [vector.tobytes() for vector in first]


@pytest.mark.parametrize(
    ("collective", "name", "shape", "message"),
    [
        ("all_reduce", "rign", {"ranks": 4}, "no schedule 'rign'"),
        ("all_reduc", "ring", {"ranks": 4}, "unknown collective"),
        ("all_reduce", "ring", {"ranks": 0}, "ranks is 0"),
        ("all_reduce", "ring", {"ranks": 4, "parts": 0}, "parts is 0"),
        ("broadcast", "chain", {"ranks": 4, "root": 4}, "rank 4 of 4"),
        ("all_reduce", "two_level", {"ranks": 10, "gpus": 4}, "10 ranks do not fill nodes of 4"),
        ("all_gather", "pat", {"ranks": 4, "aggregate": 0}, "aggregate 0"),
        ("all_reduce", "sparse", {"ranks": 4, "present": np.ones((3, 4), bool)}, "3 rows"),
        ("all_reduce", "sparse", {"ranks": 4, "present": np.ones((4, 4))}, "float64"),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_values(collective, name, shape, message):
    with pytest.raises(ScheduleError, match=message):
        make(collective, name, **shape)


def test_ranks_that_disagree_are_refused_before_anything_runs():
    ring = make("all_reduce", "ring", 3)
    even, odd = np.zeros(4), np.zeros(5)
    with pytest.raises(ScheduleError, match=r"rank 1 brings float64\[5\], rank 0 float64\[4\]"):
        interpret(ring, [even, odd, even])
    with pytest.raises(ScheduleError, match="rank 2 brings int64"):
        interpret(ring, [even, even, np.zeros(4, int)])
    with pytest.raises(ScheduleError, match="3 ranks, got 2"):
        interpret(ring, [even, even])
