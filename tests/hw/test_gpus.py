"""GPUs are read from whatever can be asked, and what a card does not say stays None."""

from types import SimpleNamespace

import pytest
from synthetic_hosts import healthy_gpu, plant

from cairn.hw import gpus as gpus_module
from cairn.hw.gpus import complete_from_sysfs, first_answer, gpus_from_torch, read_gpus
from cairn.hw.machine import Gpu, GpuProcess, PcieLink
from cairn.hw.nvml import Nvml, NvmlMissing, gpus_from_nvml, open_nvml, sysfs_bus


class FakeNvmlError(Exception):
    pass


def fake_nvml(**answers):
    """A module `pynvml` with the given answers; an exception is raised, the rest is missing."""

    def answering(value):
        def answer(*arguments):
            if isinstance(value, Exception):
                raise value
            return value(*arguments) if callable(value) else value

        return answer

    functions = {name: answering(value) for name, value in answers.items()}
    return Nvml(
        SimpleNamespace(NVMLError=FakeNvmlError, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, **functions)
    )


FULL_CARD = {
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
    "nvmlDeviceGetName": b"NVIDIA H200",
    "nvmlDeviceGetUUID": "GPU-1",
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:3B:00.0"),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=141 << 30, used=1 << 30),
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetNumGpuCores": 132 * 128,
    "nvmlDeviceGetMaxClockInfo": lambda _, kind: {1: 1980, 2: 3201}[kind],
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetCurrPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetEccMode": (1, 1),
    "nvmlDeviceGetTotalEccErrors": 2,
    "nvmlDeviceGetRemappedRows": (0, 3, 1, 0),
    "nvmlDeviceGetMigMode": (0, 0),
    "nvmlDeviceGetNvLinkState": lambda _, link: 1 if link < 17 else 0,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x40 | 0x01,
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7, usedGpuMemory=1 << 30)],
}


def test_a_card_that_answers_everything():
    (gpu,) = gpus_from_nvml(fake_nvml(**FULL_CARD))
    assert (gpu.name, gpu.uuid, gpu.pci_bus) == ("NVIDIA H200", "GPU-1", "0000:3b:00.0")
    assert (gpu.capability, gpu.sm_count, gpu.power_limit_w) == ("9.0", 132, 700)
    assert (gpu.max_sm_clock_hz, gpu.max_memory_clock_hz) == (1_980_000_000, 3_201_000_000)
    assert gpu.pcie == PcieLink(generation=5, width=16, max_generation=5, max_width=16)
    assert (gpu.ecc.enabled, gpu.ecc.uncorrected, gpu.ecc.remapped_rows) == (True, 2, 3)
    assert (gpu.ecc.remap_pending, gpu.ecc.remap_failed) == (True, False)
    assert (gpu.mig, gpu.nvlinks, gpu.slowdowns) == (False, 17, ["hardware thermal slowdown"])
    assert gpu.processes == [GpuProcess(pid=7, memory_bytes=1 << 30)]


@pytest.mark.parametrize("question", sorted(FULL_CARD.keys() - {"nvmlDeviceGetCount"}))
def test_a_card_that_refuses_one_question_is_still_a_card(question):
    refused = FULL_CARD | {question: FakeNvmlError("not supported")}
    missing = {name: answer for name, answer in FULL_CARD.items() if name != question}
    expected = 0 if question == "nvmlDeviceGetHandleByIndex" else 1
    assert len(gpus_from_nvml(fake_nvml(**refused))) == expected
    assert len(gpus_from_nvml(fake_nvml(**missing))) == expected


def test_a_card_that_says_nothing():
    silent = fake_nvml(nvmlDeviceGetCount=1, nvmlDeviceGetHandleByIndex=0)
    assert gpus_from_nvml(silent) == [Gpu(index=0, name="unknown GPU", source="nvml")]


def test_nvml_without_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with pytest.raises(NvmlMissing, match="nvidia-ml-py is not installed"), open_nvml():
        pass


def test_sources_in_turn_with_a_note_for_each_that_failed():
    def no_nvml():
        raise NvmlMissing("the package nvidia-ml-py is not installed")

    def by_torch():
        return [healthy_gpu()]

    assert first_answer([no_nvml, by_torch]) == (
        [healthy_gpu()],
        ["GPUs: the package nvidia-ml-py is not installed"],
    )
    found, notes = first_answer([no_nvml])
    assert found == []
    assert "nothing here can ask it" in notes[-1]


def test_no_driver_asks_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus_module, "first_answer", lambda sources: pytest.fail("asked"))
    assert read_gpus(tmp_path) == ([], [])


def test_a_driver_is_asked_and_sysfs_completes(tmp_path, monkeypatch):
    bare = Gpu(index=0, name="X", source="torch", pci_bus="0000:3b:00.0")
    monkeypatch.setattr(gpus_module, "first_answer", lambda sources: ([bare], ["a note"]))
    folder = "sys/bus/pci/devices/0000:3b:00.0"
    root = plant(
        tmp_path,
        {
            "dev/nvidiactl": "",
            f"{folder}/numa_node": "1",
            f"{folder}/current_link_speed": "2.5 GT/s PCIe",
            f"{folder}/max_link_speed": "32.0 GT/s PCIe",
            f"{folder}/current_link_width": "8",
            f"{folder}/max_link_width": "16",
        },
    )
    (gpu,), notes = read_gpus(root)
    assert notes == ["a note"]
    assert gpu.numa_node == 1
    assert gpu.pcie == PcieLink(generation=1, width=8, max_generation=5, max_width=16)


def test_what_the_source_said_about_the_link_stays(tmp_path):
    gpu = complete_from_sysfs(healthy_gpu(), tmp_path)
    assert gpu.pcie == healthy_gpu().pcie


def test_bus_numbers_in_both_spellings():
    assert sysfs_bus("00000000:3B:00.0") == "0000:3b:00.0"
    assert sysfs_bus("0000:3b:00.0") == "0000:3b:00.0"


@pytest.mark.gpu
def test_torch_and_the_driver_see_the_same_card():
    by_torch = gpus_from_torch()
    listed, _ = read_gpus(__import__("pathlib").Path("/"))
    assert {gpu.name for gpu in by_torch} <= {gpu.name for gpu in listed}
    assert all(gpu.sm_count and gpu.l2_bytes and gpu.memory_bytes for gpu in by_torch)
