"""Which models and which steps are computed in two halves; what they compute is tested on a GPU."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from cairn.models.fused import Fused
from cairn.models.presets import PRESETS
from cairn.serve.engine.two_batch_overlap import (
    FEWEST,
    MOST_HALF,
    First,
    Second,
    TwoBatchOverlap,
    suits,
)

SMALL = cast(Fused, SimpleNamespace(small=lambda rows: True))
LARGE = cast(Fused, SimpleNamespace(small=lambda rows: False))


@pytest.mark.parametrize(
    ("name", "fits"),
    [("qwen3-0.6b", True), ("llama-3.2-1b", True), ("mistral-7b-v0.1", False), ("tiny", False)],
)  # one has windows, the other heads that no tile fits
def test_models(name: str, fits: bool):
    assert suits(PRESETS[name](), SMALL) is fits


def test_large_products_and_the_switch(monkeypatch: pytest.MonkeyPatch):
    spec = PRESETS["qwen3-0.6b"]()
    assert not suits(spec, LARGE)
    assert not suits(spec, None)
    monkeypatch.setenv("CAIRN_HALVES", "0")
    assert not suits(spec, SMALL)


def test_steps():
    halves = TwoBatchOverlap.__new__(TwoBatchOverlap)
    halves.fewest = FEWEST
    assert [halves.worth(n) for n in (1, FEWEST - 1, FEWEST, 2 * MOST_HALF, 2 * MOST_HALF + 1)] == [
        False,
        False,
        True,
        True,
        False,
    ]


class Recorded:
    """A stream and a fence that note what is asked of them."""

    def __init__(self) -> None:
        self.waited: list[object] = []
        self.added = 0

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def add(self, value: int) -> None:
        self.added += 1


@pytest.mark.parametrize("ended", [None, "the event"])
def test_the_second_waits_once_and_only_for_a_first_that_has_attention(
    monkeypatch: pytest.MonkeyPatch, ended: object
):
    recorded, first = Recorded(), First()
    monkeypatch.setattr("torch.cuda.current_stream", lambda: recorded)
    first.ended = cast("torch.cuda.Event", ended)
    second = Second(first, cast("torch.Tensor", recorded))
    second.before()
    second.before()
    assert recorded.waited == ([] if ended is None else [ended])
    assert recorded.added == len(recorded.waited)  # the fence is the kernel that waits
