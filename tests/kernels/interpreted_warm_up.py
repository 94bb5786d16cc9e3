"""What an engine compiles in advance for special draws runs, in the interpreter, and changes nothing."""

import cairn.kernels.interpret  # isort: skip  # noqa: F401

import torch

from cairn.serve.engine import warm_up
from cairn.serve.engine.sampler import Sampler


def test_every_special_draw_runs_on_padding():
    sampler = Sampler(3, 300, "cpu")
    before = sampler.parameters.temperature_N.clone()
    warm_up.draw_special(sampler, torch.bfloat16, 3)
    assert torch.equal(sampler.parameters.temperature_N, before)
    assert sampler._penalties is None
