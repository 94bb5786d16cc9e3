"""The floor under the steps of an engine: the roofline's arithmetic, and where its ceilings come from."""

import asyncio

import msgspec
import pytest

from cairn.hw.ceilings import Ceilings, Identity, Measured, save
from cairn.hw.datasheet import find_chip
from cairn.models.cache import cache_bytes_per_token
from cairn.models.presets import preset
from cairn.models.step_cost import SequenceWork, step_cost
from cairn.serve.engine.messages import Facts
from cairn.serve.engine.step_times import NOTHING, Spent, StepTimes
from cairn.serve.http.ledger import floor
from cairn.serve.http.ledger.floor import (
    LANES,
    LOOK_AGAIN_S,
    LOOKS,
    Floors,
    KnownCeilings,
    known_ceilings,
    quick_look,
)

SPEC = preset("tiny-qwen3")
H200 = "NVIDIA H200"


def measured(value, unit="FLOP/s"):
    return Measured(value=value, unit=unit, low=value, high=value, runs=1, how="a test")


def ceilings(**rates):
    nobody = Identity(cpu=None, threads=None, gpus=[], driver=None, torch=None)
    return Ceilings(
        measured_at="now",
        quick=True,
        identity=nobody,
        device="cpu",
        device_name="my chip",
        copy=measured(1e9, "B/s"),
        matmul={name: measured(rate) for name, rate in rates.items()},
    )


def facts(weight_bytes=4.0, ranks=1, **more):
    own = dict(
        device="cpu",
        device_name="my chip",
        dtype="float32",
        weights_bytes=int(weight_bytes * SPEC.parameters()),
        read_bytes=int(weight_bytes * SPEC.matmul_parameters() / ranks),
        kv_bytes_per_token=cache_bytes_per_token(SPEC, 4) / ranks,
        ranks=ranks,
    )
    return Facts(**(own | more))


def decode(sequences, seen):
    """A step in which so many requests get their next token."""
    read = sequences * seen
    return StepTimes(1, sequences, sequences, 0.1, 0.1, 0.1, 0.1, 1.0, 0, sequences, read, read)


def test_a_step_is_bound_by_what_takes_longer():
    floors = Floors(SPEC, facts(), KnownCeilings(ceilings(fp32=1e12)))
    cost = step_cost(SPEC, [SequenceWork(1, 9)] * 3, 4)
    found = floors.of_step(decode(3, 10))
    assert found.bound == "memory"
    assert found.seconds == pytest.approx(cost.bytes / 1e9)
    slow = Floors(SPEC, facts(), KnownCeilings(ceilings(fp32=1e6))).of_step(decode(3, 10))
    assert slow.bound == "compute"
    assert slow.seconds == pytest.approx(cost.flops / 1e6)


def test_the_floor_of_many_steps_is_below_the_sum_of_theirs():
    floors = Floors(SPEC, facts(), KnownCeilings(ceilings(fp32=2e9)))
    prompt = StepTimes(1, 1, 40, 0, 0, 0, 0, 0, 40, 1, 40, 40 * 41 // 2)
    steps = [prompt, *(decode(1, seen) for seen in range(41, 61))]
    names = ("tokens", "prefill", "sampled", "read", "pairs")
    spent = Spent(len(steps), *(sum(getattr(step, name) for step in steps) for name in names))
    each = [floors.of_step(step) for step in steps]
    assert {floor.bound for floor in each} == {"memory", "compute"}
    together = floors.of(spent)
    assert together.seconds <= sum(floor.seconds for floor in each) + 1e-12
    assert together.seconds == pytest.approx(
        max(sum(f.memory_s for f in each), sum(f.compute_s for f in each))
    )


def test_ranks_share_the_work():
    alone = Floors(SPEC, facts(), KnownCeilings(ceilings(fp32=1e12))).of_step(decode(4, 30))
    both = Floors(SPEC, facts(ranks=2), KnownCeilings(ceilings(fp32=1e12))).of_step(decode(4, 30))
    assert both.seconds == pytest.approx(alone.seconds / 2)


def test_packed_weights_are_read_and_multiplied_in_what_they_are():
    packed = Floors(SPEC, facts(0.5), KnownCeilings(ceilings(fp32=1e12)))
    plain = Floors(SPEC, facts(), KnownCeilings(ceilings(fp32=1e12)))
    small = StepTimes(1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0)
    assert packed.of_step(small).memory_s == pytest.approx(plain.of_step(small).memory_s / 8)
    assert packed.of_step(small).compute_s == pytest.approx(plain.of_step(small).compute_s / LANES)
    known = Floors(SPEC, facts(0.5), KnownCeilings(ceilings(fp32=1e12, int8=3e12)))
    assert known.of_step(small).compute_s == pytest.approx(plain.of_step(small).compute_s / 3)


def test_nothing_is_said_where_nothing_is_known():
    floors = Floors(SPEC, facts(), KnownCeilings())
    assert floors.of_step(decode(1, 5)) is None
    assert msgspec.to_builtins(floors.view()) == {
        "memory_gbps": None,
        "tflops": None,
        "measured": False,
    }
    assert Floors(SPEC, facts(), KnownCeilings(ceilings(fp32=1e12))).of(NOTHING) is None
    assert (
        Floors(SPEC, Facts(), KnownCeilings(ceilings(fp32=1e12))).of_step(decode(1, 5)) is None
    )  # a device that plays one


def test_a_calibrated_machine_is_better_than_a_data_sheet(tmp_path, monkeypatch):
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path))
    gpu = facts(device="cuda:0", device_name=H200, dtype="bfloat16")
    chip = find_chip(H200)[0]
    assert known_ceilings(gpu) == KnownCeilings(None, chip)
    floors = Floors(SPEC, gpu)
    assert floors.view().memory_gbps == chip.bytes_per_s / 1e9
    assert floors.of_step(decode(1, 5)).from_datasheet == ("memory", "compute")
    mine = msgspec.structs.replace(ceilings(bf16=5e14), device_name=H200)
    save(mine, tmp_path / "machine.json")
    assert known_ceilings(gpu) == KnownCeilings(mine, chip, measured=True)
    assert Floors(SPEC, gpu).view().measured
    other = facts(device="cuda:0", device_name="another chip")
    assert known_ceilings(other) == KnownCeilings()


def test_quick_looks_are_few_and_only_at_an_idle_cpu(monkeypatch):
    looked, now = [], [100.0]

    def look(given):
        looked.append(given)
        return KnownCeilings(ceilings(fp32=1e12 * (3 if len(looked) == 2 else 1)))

    monkeypatch.setattr(floor, "quick_look", look)
    floors = Floors(SPEC, facts(), KnownCeilings(), clock=lambda: now[0])
    asyncio.run(floors.look(idle=False))
    assert not looked
    asyncio.run(floors.look(idle=True))
    asyncio.run(floors.look(idle=True))
    assert len(looked) == 1
    assert floors.view().tflops == 1.0
    for _ in range(20):
        now[0] += LOOK_AGAIN_S
        asyncio.run(floors.look(idle=True))
    assert len(looked) == LOOKS
    assert floors.view().tflops == 3.0  # the best of them
    assert not floors.view().measured
    asyncio.run(Floors(SPEC, facts(device="cuda:0"), KnownCeilings()).look(idle=True))
    asyncio.run(Floors(SPEC, facts(), KnownCeilings(ceilings(fp32=1.0))).look(idle=True))
    assert len(looked) == LOOKS


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_quick_look_finds_something(dtype):
    """What has no products of its own is computed in float32."""
    found = quick_look(facts(dtype=dtype))
    assert found.ceilings.copy.value > 1e7
    assert found.ceilings.matmul["fp32"].value > 1e6
    assert not found.measured
    assert Floors(SPEC, facts(dtype=dtype), found).of_step(decode(3, 10)) is not None
