"""Adapters in an engine: each request is answered as by a model with its adapter merged, whoever else is there."""

import json
import shutil
import signal

import pytest
import tiny_adapters
import tiny_checkpoints
import torch
from client_stream import submit
from forked_workers import forked
from hypothesis import given
from hypothesis import strategies as st
from tiny_engines import at_rest, greedy, model, prompt_of, tiny_engine

from cairn.core.errors import CairnError, ConfigError, RequestError, UnsupportedModel, WeightsError
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.checkpoint import open_checkpoint
from cairn.models.generate import GenerateSampling, Generation
from cairn.models.runnable import OpenModel, Runnable, open_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.adapter_columns import Positions
from cairn.serve.engine.adapter_residency import Residency
from cairn.serve.engine.adapter_slots import AdapterSlots
from cairn.serve.engine.adapters import Adapters, segments_of
from cairn.serve.engine.client import EngineClient, ProcessOptions
from cairn.serve.engine.messages import EngineFailed
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with
from cairn.serve.engine.step import Chunk

FAMILY, MOST = "qwen3", 10
SPECS = {
    1: AdapterSpec(rank=4, alpha=8),
    2: AdapterSpec(rank=3, alpha=6, dora=True, targets=("q_proj", "down_proj")),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders by number, and the models with each adapter merged."""
    root, base = tmp_path_factory.mktemp("adapters"), tiny_checkpoints.folder(FAMILY)
    merged = {n: tiny_adapters.write(base, spec, root / str(n), n) for n, spec in SPECS.items()}
    return {n: str(root / str(n)) for n in SPECS}, merged


def request(id, prompt, adapter=0):
    params = SamplingParams(temperature=0.0, max_tokens=MOST, ignore_eos=True)
    identity = b"adapter %d;" % adapter if adapter else b""
    return Request(id, prompt, params, adapter=adapter, identity=identity)


def with_adapters(folders, **how):
    engine = tiny_engine(FAMILY, **how)
    for number, folder in folders.items():
        engine.load_adapter(number, engine.read_adapter(folder))
    return engine


def wanted(net, prompt):
    return list(Generation(net, prompt, GenerateSampling(max_tokens=MOST), ()))


@pytest.mark.parametrize("how", [{"plain": True}, {"chunked": True}, {"overlap": True}])
def test_each_request_has_its_own_adapter(made, how):
    """The same prompt under three names, and others: in one step, twice, so that prefixes are found again."""
    folders, merged = made
    engine = with_adapters(folders, **how)
    nets = {0: model(FAMILY), **merged}
    for turn in range(2):
        asked = [
            request(10 * turn + 3 * p + n, prompt_of(length, 1), n)
            for p, length in enumerate((37, 5, 20))
            for n in nets
        ]
        for one in asked:
            engine.add(one)
        engine.run()
        for one in asked:
            assert one.outputs == wanted(nets[one.adapter], one.prompt), (turn, one.adapter)
    assert any(one.cached for one in asked)
    assert len({tuple(one.outputs) for one in asked[:3]}) == 3
    at_rest(engine)


def test_packed_weights_take_adapters(made):
    """Over the int8 form on a CPU, whose norms a step without adapters folds away."""
    folders, merged = made
    net = open_checkpoint(tiny_checkpoints.folder(FAMILY)).load("cpu", torch.float32)
    config = EngineConfig(
        model=FAMILY, device="cpu", dtype="float32", weights="int8", num_gpu_blocks_override=32
    )
    opened = OpenModel(FAMILY, net.spec, None, (), None)
    engine = start_with(opened, Runnable(FAMILY, net, "a test"), config, sole=True).engine
    with pytest.raises(WeightsError, match="weights are packed"):
        engine.read_adapter(folders[2])
    engine.load_adapter(1, engine.read_adapter(folders[1]))
    plain, adapted = request(1, prompt_of(9, 1)), request(2, prompt_of(9, 1), 1)
    for one in (plain, adapted):
        engine.add(one)
    engine.run()
    alone = request(3, prompt_of(9, 1), 1)
    engine.add(alone)
    engine.run()
    assert alone.outputs[:4] == adapted.outputs[:4] == wanted(merged[1], alone.prompt)[:4]
    assert adapted.outputs != plain.outputs


def test_adapters_go_on_behind_a_sleep_that_drops_the_weights(made):
    """Also one that was made of them: DoRA has the lengths of their rows."""
    folders, merged = made
    folder = tiny_checkpoints.folder(FAMILY)
    net = open_checkpoint(folder).load("cpu", torch.float32)
    config = EngineConfig(model=FAMILY, device="cpu", dtype="float32", num_gpu_blocks_override=32)
    opened = OpenModel(FAMILY, net.spec, None, (), None)
    engine = start_with(opened, Runnable(FAMILY, net, "a test"), config, sole=True).engine
    engine.runner.source = str(folder)
    engine.load_adapter(2, engine.read_adapter(folders[2]))
    engine.sleep(2)
    engine.wake()
    asked = request(1, prompt_of(9, 1), 2)
    engine.add(asked)
    engine.run()
    assert asked.outputs == wanted(merged[2], asked.prompt)


def test_an_adapter_that_is_unloaded_finishes_its_requests(made):
    folders, merged = made
    engine = with_adapters(folders)
    first = request(1, prompt_of(20, 1), 1)
    engine.add(first)
    engine.step()
    engine.unload_adapter(1)
    with pytest.raises(RequestError, match="unloaded"):
        engine.add(request(2, prompt_of(5, 1), 1))
    engine.run()
    assert first.outputs == wanted(merged[1], first.prompt)
    assert list(engine.runner.adapters.loaded) == [2]
    engine.add(after := request(3, prompt_of(20, 1)))
    engine.run()
    assert after.outputs == greedy(FAMILY, tuple(after.prompt), MOST)


def test_more_adapters_than_the_device_keeps(made):
    """One at a time on the device: both answer, in one step and in turns."""
    folders, merged = made
    engine = tiny_engine(FAMILY)
    engine.runner.adapters.keep(1)
    for number, folder in folders.items():
        engine.load_adapter(number, engine.read_adapter(folder))
    for turn, numbers in enumerate(((1,), (2,), (1, 2))):
        asked = [request(10 * turn + n, prompt_of(9, 1), n) for n in numbers]
        for one in asked:
            engine.add(one)
        engine.run()
        for one in asked:
            assert one.outputs == wanted(merged[one.adapter], one.prompt)
    engine.unload_adapter(1)
    assert 1 not in engine.runner.adapters._residency


@given(st.integers(1, 4), st.lists(st.sets(st.integers(1, 8), min_size=1, max_size=6), max_size=12))
def test_the_adapters_used_last_stay(most, steps):
    residency, there, recent = Residency(most), set(), []
    for numbers in steps:
        moves = residency.use(sorted(numbers))
        assert set(moves.bring) == numbers - there
        assert set(moves.put_out) <= there - numbers
        there = (there | numbers) - set(moves.put_out)
        recent = [n for n in recent if n not in numbers] + sorted(numbers)
        assert len(there) <= max(most, len(numbers))
        assert there >= set(recent[-most:])


def test_what_cannot_be_served_is_refused(tmp_path):
    base = tiny_checkpoints.folder("mistral-full")
    tiny_adapters.write(base, AdapterSpec(rank=2, targets=("lm_head",)), tmp_path / "head")
    net = open_checkpoint(base).load("cpu", torch.float32)
    with pytest.raises(UnsupportedModel, match="covers head"):
        Adapters(net).read(str(tmp_path / "head"))
    tiny_adapters.write(base, AdapterSpec(rank=2), tmp_path / "other")
    with pytest.raises(WeightsError, match="another base model"):
        Adapters(model("llama-one-kv-head")).read(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="batch_invariant"):
        tiny_engine(FAMILY, invariant=True).read_adapter("anywhere")


def test_segments():
    def chunk(adapter, count):
        return Chunk(request(0, [1], adapter), 0, count, [], 0, 1)

    assert segments_of([chunk(0, 2), chunk(0, 1)], "cpu") == []
    assert segments_of([chunk(4, 2), chunk(4, 1)], "cpu") == [(4, None)]
    mixed = segments_of([chunk(2, 1), chunk(0, 2), chunk(1, 1), chunk(2, 2)], "cpu")
    assert [(n, rows.tolist()) for n, rows in mixed] == [(1, [3]), (2, [0, 4, 5])]


def test_workers_that_are_started_again_have_the_adapters(tmp_path):
    random = "random:tiny-llama"
    base = open_model(random).load("cpu", "float32").model
    tiny_adapters.write(base, AdapterSpec(rank=2), tmp_path / "legal")
    odd = tmp_path / "odd"
    shutil.copytree(tmp_path / "legal", odd)
    settings = odd / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"target_modules": "("}))
    config = EngineConfig(model=random, device="cpu", dtype="float32", num_gpu_blocks_override=32)
    client = EngineClient(config, ProcessOptions(beat_s=0.05, restarts=1), spawn=forked())
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def answer(adapter):
        stream = submit(client, [5, 9, 100, 7], params, adapter=adapter, identity=b"%d" % adapter)
        return [token for delta in stream for token in delta.tokens]

    try:
        client.load_adapter(1, str(tmp_path / "legal"))
        with pytest.raises(CairnError, match="/absent"):
            client.load_adapter(2, "/absent")
        with pytest.raises(WeightsError, match=r"cannot be read: \w*[eE]rror"):
            client.load_adapter(2, str(odd))
        assert client.restarted == 0  # nobody else has noticed
        legal = answer(1)
        assert legal != answer(0)
        client._group.processes[0].send_signal(signal.SIGKILL)
        with pytest.raises(EngineFailed):
            answer(1)
        assert answer(1) == legal
        client.unload_adapter(1)
        assert answer(1) == []  # refused
    finally:
        client.close(0.0)


def test_graphs_are_void_once_when_an_unaligned_adapter_comes_and_goes(tmp_path):
    base = tiny_checkpoints.folder(FAMILY)
    net = open_checkpoint(base).load("cpu", torch.float32)
    limits = Limits(rows=8, step_tokens=32, pages=8, page_size=8, context=64, vocabulary=300)
    slots, loaded, layouts = AdapterSlots(net, limits), {}, []
    for number, rank in ((1, 8), (2, 3)):
        tiny_adapters.write(base, AdapterSpec(rank=rank, alpha=8), tmp_path / str(number), number)
        loaded[number] = Adapters(net).read(str(tmp_path / str(number))).addends
        assert slots.put(number, loaded[number])
        layouts.append(slots.layouts)
    assert layouts[1] == layouts[0] + 1
    slots.drop(2)
    assert slots.put(3, loaded[2])
    assert slots.layouts == layouts[1]


@given(st.lists(st.tuples(st.sets(st.integers(1, 9), min_size=1, max_size=8), st.booleans())))
def test_adapters_of_a_step_have_positions_that_its_product_reads(steps):
    """Whatever came before: each of its own, among the first ones, and only those that were not there are copied."""
    positions, copied = Positions(8), {}
    for slots, all_of_them in steps:
        among = 8 if all_of_them else 4
        slots = set(sorted(slots)[:among])
        before = {slot for slot in slots if copied.get(positions.by_slot().get(slot, 8)) == slot}
        there = {slot for slot in before if positions.by_slot()[slot] < among}
        moves = positions.place(slots, among)
        assert {move.slot for move in moves} == slots - there
        copied |= {move.position: move.slot for move in moves}
        found = positions.by_slot()
        assert all(found[slot] < among and copied[found[slot]] == slot for slot in slots)
    positions.drop(3)
    assert 3 not in positions.by_slot()


def test_room_for_adapters_is_refused_where_steps_have_no_use_for_it():
    opened, net = OpenModel(FAMILY, model(FAMILY).spec, None, (), None), model(FAMILY)
    for how in ({}, {"batch_invariant": True}):
        config = EngineConfig(model=FAMILY, device="cpu", dtype="float32", lora_room=4, **how)
        with pytest.raises(ConfigError, match="lora_room is 4"):
            start_with(opened, Runnable(FAMILY, net, "a test"), config)


def test_what_an_answer_left_in_a_page_is_not_read_by_the_next(made, tmp_path):
    """Also where it is NaN, and masked: pages are reused, and the sum of a weight of 0 and NaN is NaN."""
    engine = with_adapters({1: made[0][1]}, rows=4, pages=8, prefix=False)
    for lora in engine.runner.adapters.loaded[1].addends.values():
        for parameter in lora.parameters():
            parameter.data.fill_(torch.nan)
    for turn in range(3):
        asked = [request(10 * turn + n, prompt_of(14, 1), int(n in (0, 3))) for n in range(4)]
        for one in asked:
            engine.add(one)
        engine.run()
        for one in asked[1:3]:
            assert one.outputs == wanted(model(FAMILY), one.prompt), turn
    at_rest(engine)
