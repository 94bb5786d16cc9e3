"""Whether weights fit is answered before they are loaded, with what they need and what would fit."""

import pytest
import torch

from cairn.core.errors import HardwareError
from cairn.hw.machine import HostMemory
from cairn.models import weights_fit
from cairn.models.presets import preset
from cairn.models.runnable import open_model

GIB = 1 << 30


def hint(name, dtype, device="cpu", ranks=1) -> str:
    with pytest.raises(HardwareError) as error:
        weights_fit.refuse_what_does_not_fit(name, preset(name), dtype, device, ranks, 16 * GIB)
    assert "parameters" in error.value.message
    assert "16 GiB are free" in error.value.message
    return error.value.hint or ""


def test_what_fits_is_loaded_and_what_does_not_says_what_would():
    weights_fit.refuse_what_does_not_fit(
        "a", preset("qwen3-4b"), torch.bfloat16, "cpu", ranks=1, free=16 * GIB
    )
    assert "such as qwen3-4b" in hint("llama-3.1-70b", torch.float32)
    assert "dtype bfloat16" in hint("qwen3-8b", torch.float32)
    assert "tensor_parallel_size 16" in hint("llama-3.1-70b", torch.bfloat16, "cuda")
    assert "parameters" in hint("llama-3.1-70b", torch.bfloat16, "cuda", ranks=4)


def test_a_model_is_asked_before_its_weights_are_made(monkeypatch):
    monkeypatch.setattr(weights_fit, "free_bytes", lambda device, mapped=False: GIB)
    with pytest.raises(HardwareError, match=r"random:llama-3\.1-70b needs"):
        open_model("random:llama-3.1-70b").load("cpu")
    monkeypatch.setattr(weights_fit, "free_bytes", lambda device, mapped=False: None)
    assert open_model("random:tiny-qwen3").load("cpu").device == "cpu"


def test_a_container_has_no_more_than_its_limit(monkeypatch):
    small = HostMemory(
        total_bytes=64 * GIB, available_bytes=60 * GIB, limit_bytes=4 * GIB, used_bytes=GIB
    )
    monkeypatch.setattr(weights_fit, "read_memory", lambda root: (small, []))
    assert (weights_fit.free_bytes("cpu"), weights_fit.free_bytes("cpu", mapped=True)) == (
        3 * GIB,
        4 * GIB,
    )
    full = HostMemory(available_bytes=60 * GIB, limit_bytes=4 * GIB, used_bytes=5 * GIB)
    assert full.free_bytes == 0  # a limit may be lowered below what is used


def test_this_machine_says_what_is_free():
    free, all_of_it = weights_fit.free_bytes("cpu"), weights_fit.free_bytes("cpu", mapped=True)
    assert free is not None
    assert all_of_it is not None
    assert 0 < free <= all_of_it
