"""The search over layouts: near what others published, no better choice missed, memory as the trainer counts."""

import itertools

import msgspec
import pytest

from cairn.core.errors import ConfigError
from cairn.models.presets import preset
from cairn.plan.device import device
from cairn.plan.measured import median_error, torchtitan_here, training
from cairn.plan.published import compare
from cairn.plan.train_cost import Choice, Job, collective, stash, step_time
from cairn.plan.train_memory import rank_memory
from cairn.plan.train_search import BEST, choices, layouts, search
from cairn.train.config import Data, Precision, Train
from cairn.train.memory import OF_DEVICE, predict
from cairn.train.parallel.layout import Layout
from cairn.train.parallel.pipeline.schedules import schedule
from cairn.train.parallel.pipeline.simulate import simulate

H200 = device("h200")


def test_published_training_on_several_gpus_is_within_a_fifth():
    rows = compare()
    assert len(rows) >= 15
    assert {row.what: row.error for row in rows if abs(row.error) > 0.20} == {}
    assert (median_error(rows) or 1) < 0.10


def test_training_on_one_h200_is_within_an_eighth():
    rows = training() + torchtitan_here()
    assert (median_error(rows) or 1) <= 0.12


def test_every_product_of_the_gpus_is_tried_once():
    found = list(layouts(preset("qwen3-8b"), 16))
    assert len(set(found)) == len(found)
    sizes = [1, 2, 4, 8, 16]
    brute = {
        (dp, fsdp, pp, cp, tp)
        for dp, fsdp, pp, cp, tp in itertools.product(sizes, repeat=5)
        if dp * fsdp * pp * cp * tp == 16 and tp <= 8
    }
    assert {(one.dp, one.fsdp, one.pp, one.cp, one.tp) for one in found} == brute


def test_experts_are_cut_over_data_ranks_only():
    found = list(layouts(preset("qwen3-30b-a3b"), 8))
    assert {one.ep for one in found} == {1, 2, 4, 8}
    assert all(one.data_ranks() % one.ep == 0 for one in found)


def test_the_best_is_the_best_of_all_that_fit():
    """Brute force: every choice costed, without the shortcuts of the search."""
    job = Job(spec=preset("qwen3-1.7b"), sequence=4096, sequences=32)
    plan = search(job, 8, H200)
    fitting = {}
    for choice in choices(job, 8):
        if rank_memory(job, choice).total() <= OF_DEVICE * H200.memory_bytes:
            fitting[choice.words()] = step_time(job, choice, H200).total()
    assert (
        plan.rows[0].seconds <= min(fitting.values()) * 1.006
    )  # ties of half a percent go to the simpler
    assert plan.tried == sum(row.count for row in plan.lost) + len(plan.rows)
    assert len(plan.rows) <= BEST
    assert all(row.why for row in plan.rows[1:])
    assert plan.rows[0].why == ""


def test_8b_on_64_gpus():
    plan = search(Job(spec=preset("qwen3-8b"), sequence=4096, sequences=1024), 64, H200)
    best = plan.rows[0]
    assert 0.4 < best.mfu < 0.69  # nothing is faster than its own products
    assert best.memory.total() <= OF_DEVICE * H200.memory_bytes
    assert {row.kind for row in plan.lost} >= {"too large", "slower"}
    assert best.choice.layout.world() == 64


def test_what_does_not_fit_says_what_is_too_large():
    plan = search(Job(spec=preset("llama-3.1-70b"), sequence=4096, sequences=64), 4, H200)
    assert plan.rows == []
    assert sum(row.count for row in plan.lost) == plan.tried
    assert any("states" in row.reason for row in plan.lost)


def test_what_cannot_run_has_the_trainers_own_equation():
    plan = search(Job(spec=preset("qwen3-8b"), sequence=4096, sequences=70), 7, H200)
    assert any("tp 7 does not divide 32 attention heads" in row.reason for row in plan.lost)


def test_memory_of_one_rank_is_the_trainers():
    job = Job(spec=preset("qwen3-0.6b"), sequence=4096, sequences=8)
    choice = Choice(layout=Layout(), microbatch=8, recompute="none")
    config = Train(
        precision=Precision(kind="bfloat16"), data=Data(sequence=4096, sequences=8, microbatch=8)
    )
    assert rank_memory(job, choice).total() == pytest.approx(
        predict(job.spec, config, fused=True).total(), rel=0.03
    )


def test_fsdp_divides_what_it_cuts_and_pp_keeps_microbatches_in_flight():
    job = Job(spec=preset("qwen3-8b"), sequence=4096, sequences=64)
    alone, cut = (
        rank_memory(job, Choice(layout=layout, microbatch=1, recompute="none"))
        for layout in (Layout(dp=8), Layout(fsdp=8))
    )
    assert cut.states == pytest.approx(alone.states / 8, rel=1e-6)
    assert cut.weights < alone.weights / 4
    assert cut.activations == alone.activations
    assert stash("1f1b", 4, 16) == max(simulate(schedule("1f1b", 4, 16)).stash) == 4


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 8), (4, 4), (4, 32), (8, 64)])
def test_the_bubble_is_the_schedules(pp, microbatches):
    job = Job(spec=preset("qwen3-8b"), sequence=4096, sequences=microbatches)
    time = step_time(job, Choice(layout=Layout(pp=pp), microbatch=1, recompute="none"), H200)
    staged = time.total() - time.update
    assert time.bubble / staged == pytest.approx(
        simulate(schedule("1f1b", pp, microbatches)).bubble, rel=1e-6
    )


def test_more_recomputation_takes_longer_and_less_memory():
    job = Job(spec=preset("qwen3-1.7b"), sequence=4096, sequences=8)
    kinds = ("none", "norms", "selective", "full")
    rows = [Choice(layout=Layout(), microbatch=8, recompute=kind) for kind in kinds]
    times = [step_time(job, choice, H200).total() for choice in rows]
    sizes = [rank_memory(job, choice).total() for choice in rows]
    assert times == sorted(times)
    assert sizes == sorted(sizes, reverse=True)


def test_a_collective_over_the_network_takes_longer():
    near = collective("all_gather", 8, 1 << 30, H200)
    far = collective("all_gather", 8, 1 << 30, H200, 8)
    assert far > 2 * near
    assert collective("all_gather", 1, 1 << 30, H200) == 0


def test_devices():
    assert device("H200").name == "h200"
    assert device("h200", usd_per_hour=9.0).usd_per_hour == 9.0
    assert msgspec.json.encode(device("b200"))
    with pytest.raises(ConfigError, match="no GPU 'h20'"):
        device("h20")
    with pytest.raises(ConfigError, match="usd per hour is -1"):
        device("h200", usd_per_hour=-1.0)
