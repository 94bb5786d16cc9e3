"""A model that sleeps gives its memory back and wakes with the same weights under the same addresses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import ConfigError, HardwareError
from cairn.serve.engine.sleep_memory import SleepMemory

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


def test_on_a_cpu_sleep_is_refused_with_what_to_do():
    from cairn.serve.config import EngineConfig
    from cairn.serve.engine.start import start

    with pytest.raises(ConfigError, match="enable_sleep_mode is on, the device is cpu"):
        start(EngineConfig(model="cairn-tiny", device="cpu", enable_sleep_mode=True))
    engine = start(EngineConfig(model="cairn-tiny", device="cpu")).engine
    with pytest.raises(ConfigError, match="cannot sleep"):
        engine.sleep()
    assert not engine.paused


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["auto", "fp8"])
def test_a_model_that_has_slept_answers_as_before(weights):
    from cairn.serve.engine.sampling_params import SamplingParams
    from cairn.serve.llm import LLM

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
        llm.serving.engine.sleep()
        freed = torch.cuda.mem_get_info()[0] - free_before
        assert freed > 20 << 30  # pages and weights
        llm.serving.engine.wake()
        assert answers() == before
