"""A model that sleeps gives its memory back and wakes with the same weights under the same addresses."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import ConfigError, HardwareError, RequestError
from cairn.serve.engine.cuda_memory import CudaMemory, _Access, _Properties
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.sleep_memory import SleepMemory
from cairn.serve.llm import LLM
from cairn.serve.serving import GenerateRequest

PAGE = 16


class FakeDriver:
    """Addresses and memory as a driver has them; refuses what a real one would crash on."""

    granularity = PAGE

    def __init__(self, room: int) -> None:
        self.room, self.made = room, 0
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, bytearray]] = {}
        self.hosts: dict[int, bytearray] = {}

    def reserve(self, size):
        self.made += 1
        self.reserved[self.made * 1000] = size
        return self.made * 1000

    def free(self, address, size):
        assert address not in self.mapped
        assert self.reserved.pop(address) == size

    def map(self, address, size):
        assert address not in self.mapped
        if sum(len(held) for _, held in self.mapped.values()) + size > self.room:
            raise HardwareError("out of memory")
        self.made += 1
        self.mapped[address] = self.made, bytearray(b"?" * size)
        return self.made

    def unmap(self, address, size, handle):
        assert self.mapped.pop(address)[0] == handle

    def pin(self, size):
        self.made += 1
        self.hosts[self.made] = bytearray(size)
        return self.made

    def save(self, host, address, size):
        self.hosts[host][:] = self.mapped[address][1]

    def load(self, address, host, size):
        self.mapped[address][1][:] = self.hosts[host]

    def zero(self, address, size):
        self.mapped[address][1][:] = bytes(size)

    def synchronize(self):
        pass


SIZES = st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=6)
STEPS = st.lists(st.sampled_from(["sleep", "wake", "taken", "released", "freed"]), max_size=8)


@given(SIZES, STEPS)
def test_contents_survive_any_order_of_sleep_and_wake_and_memory_that_others_took(sizes, steps):
    driver = FakeDriver(room=1000)
    memory = SleepMemory(driver)
    wanted = {}
    for at, (size, kept) in enumerate(sizes):
        address = memory.allocate(size, kept)
        held = driver.mapped[address][1]
        held[:] = bytes([at + 1]) * len(held)
        wanted[address] = bytes(held) if kept else bytes(len(held))
    slept = False
    for step in steps:
        if step == "sleep":
            memory.sleep()
            slept = True
            assert not driver.mapped
        elif step == "taken":
            driver.room = 20
        elif step == "released":
            driver.room = 1000
        elif step == "freed" and wanted:
            memory.release(next(iter(wanted)))
            del wanted[next(iter(wanted))]
        elif step == "wake":
            try:
                memory.wake()
            except HardwareError:
                assert memory.asleep
                assert not driver.mapped
    driver.room = 1000
    memory.wake()
    for address, contents in wanted.items():
        assert not slept or driver.mapped[address][1] == contents
    assert set(driver.mapped) == set(driver.reserved) == set(wanted)


@pytest.mark.parametrize(
    ("failing", "undone"),
    [("cuMemMap", ["cuMemRelease"]), ("cuMemSetAccess", ["cuMemUnmap", "cuMemRelease"])],
)
def test_memory_that_cannot_be_mapped_leaves_nothing_behind(failing, undone):
    called = []

    class Driver:
        def __getattr__(self, name):
            return lambda *given: (called.append(name), int(name == failing))[1]

    memory = object.__new__(CudaMemory)  # without a driver there is no other way to make one
    memory._cuda, memory._properties, memory._access = Driver(), _Properties(), _Access()
    with pytest.raises(HardwareError, match=failing):
        memory.map(1 << 21, 1 << 21)
    assert called[called.index("cuGetErrorName") + 1 :] == undone


PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    made = LLM("cairn-tiny", device="cpu", enable_sleep_mode=True)
    yield made
    made.close()


def tokens(llm):
    return llm.generate("Once upon a time", PARAMS, use_tqdm=False)[0].outputs[0].token_ids


def held_bytes(llm):
    runner = llm.serving.engine.engine.runner
    weights = sum(one.nbytes for one in runner.model.parameters())
    return weights, runner.pool.cache.nbytes


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_of_a_cpu_gives_its_memory_back_and_answers_as_before(llm, level):
    before, (weights, pages) = tokens(llm), held_bytes(llm)
    llm.sleep(level)
    llm.sleep(level)  # a second time changes nothing
    assert held_bytes(llm) == (weights if level == 1 else 0, 0)
    assert tokens(llm) == before  # the prompt has woken it
    assert held_bytes(llm) == (weights, pages)


def test_sleep_is_refused_while_a_request_is_under_way(llm):
    engine = llm.serving.engine
    llm.serving.engine.pause()
    request = GenerateRequest([1, 2, 3], PARAMS)
    jobs = llm.serving.jobs([request], lambda job: None, streamed=False)
    llm.serving.submit(jobs)
    with pytest.raises(RequestError, match="1 requests are under way"):
        llm.sleep()
    llm.serving.abort(jobs)
    engine.resume()
    assert held_bytes(llm)[1] > 0


def test_a_sleep_that_is_impossible_is_refused_before_anything_is_lost(llm, monkeypatch):
    engine = llm.serving.engine.engine
    llm.generate([list(range(300))], PARAMS, use_tqdm=False)
    cached = engine.scheduler.blocks.usage().cached
    monkeypatch.setattr(engine.runner, "source", None)
    with pytest.raises(ConfigError, match="cannot be read again"):
        llm.serving.engine.check_sleep(2)
    with pytest.raises(ConfigError, match="cannot be read again"):
        llm.sleep(2)
    assert not engine.asleep
    assert engine.scheduler.blocks.usage().cached == cached > 0


def test_a_request_that_comes_while_the_engine_falls_asleep_wakes_it(llm, monkeypatch):
    engine, submitted, found = llm.serving.engine, threading.Event(), []
    sleep, submit = engine.sleep, engine.submit
    asking = threading.Thread(target=lambda: found.append(tokens(llm)))

    def falling_asleep(level):
        sleep(level)
        asking.start()
        assert not submitted.wait(0.1)  # it waits until everybody knows

    monkeypatch.setattr(engine, "sleep", falling_asleep)
    monkeypatch.setattr(engine, "submit", lambda jobs: (submitted.set(), submit(jobs)))
    llm.sleep()
    asking.join(60)
    assert found == [tokens(llm)]


def test_a_pause_goes_on_behind_a_sleep_and_no_adapter_is_read_during_it(llm):
    host = llm.serving.engine
    host.pause()
    llm.sleep()
    with pytest.raises(ConfigError, match="the engine sleeps"):
        host.load_adapter(1, "absent")
    llm.wake_up()
    assert host.engine.paused
    host.resume()
    llm.sleep()
    llm.wake_up()
    assert not host.engine.paused


def test_a_stretched_model_is_dropped_and_read_again():
    stretched = LLM("cairn-tiny", device="cpu", context=100_000, max_model_len=512)
    before = tokens(stretched)
    stretched.sleep(2)
    assert held_bytes(stretched) == (0, 0)
    assert tokens(stretched) == before
    stretched.close()


@pytest.mark.parametrize("weights", ["int8"])
def test_packed_weights_are_not_dropped(weights):
    try:
        packed = LLM("cairn-tiny", device="cpu", weights=weights)
    except HardwareError as error:  # no kernels for few bits here
        pytest.skip(str(error))
    before = tokens(packed)
    with pytest.raises(ConfigError, match="were packed when it started"):
        packed.sleep(2)
    packed.sleep(1)
    assert tokens(packed) == before
    packed.close()


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["auto", "fp8"])
def test_a_model_that_has_slept_answers_as_before(weights):
    llm = LLM(
        "random:qwen3-0.6b",
        device="cuda",
        weights=weights,
        enable_sleep_mode=True,
        gpu_memory_utilization=0.3,
        max_model_len=4096,
    )
    prompts = [list(range(at, at + 300)) for at in (5, 900)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)

    def answers():
        return [one.outputs[0].token_ids for one in llm.generate(prompts, params)]

    before, free_before = answers(), torch.cuda.mem_get_info()[0]
    for _ in range(2):
        llm.sleep()
        freed = torch.cuda.mem_get_info()[0] - free_before
        assert freed > 20 << 30  # pages and weights
        llm.wake_up()
        assert answers() == before
    llm.sleep()  # the memory is for the tests behind it
    llm.close()
