"""Which implementation runs: the first that can, unless somebody says otherwise, and always with the reason."""

import pytest
import torch

from cairn.core.errors import ConfigError, HardwareError
from cairn.kernels import dispatch
from cairn.kernels.dispatch import choose
from cairn.kernels.norm.rmsnorm import rmsnorm

OFFERS = {"gluon": "no Hopper here", "triton": None, "reference": None}


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv("CAIRN_KERNELS", raising=False)


def test_the_first_that_can_run_is_taken_and_says_why():
    assert choose("rmsnorm", "auto", OFFERS) == ("triton", "gluon: no Hopper here")
    assert choose("rmsnorm", "auto", {"triton": None}) == ("triton", "the best there is")
    with pytest.raises(HardwareError, match=r"no implementation of rmsnorm .*: triton: too wide"):
        choose("rmsnorm", "auto", {"triton": "too wide"})


def test_a_choice_is_said_once(monkeypatch):
    said = []
    monkeypatch.setattr(dispatch, "instant", lambda name, **fields: said.append((name, fields)))
    dispatch._noted.cache_clear()
    for _ in range(3):
        choose("rmsnorm", "auto", OFFERS)
    what = {"operation": "rmsnorm", "impl": "triton", "why": "gluon: no Hopper here"}
    assert said == [("kernel choice", what)]
    dispatch._noted.cache_clear()


def test_it_can_be_told(monkeypatch):
    assert choose("rmsnorm", "reference", OFFERS) == ("reference", "as asked")
    monkeypatch.setenv("CAIRN_KERNELS", "rmsnorm=reference, all=triton")
    assert choose("rmsnorm", "auto", OFFERS) == ("reference", "CAIRN_KERNELS says so")
    assert choose("rope", "auto", OFFERS).impl == "triton"
    assert choose("rmsnorm", "triton", OFFERS).impl == "triton"  # the caller goes first
    monkeypatch.setenv("CAIRN_KERNELS", "attention_backward=triton")
    assert choose("attention_backward", "auto", {"torch": None, "triton": None}).impl == "triton"
    assert choose("attention", "auto", {"torch": None, "triton": None}).impl == "torch"


def test_what_cannot_run_is_an_error_and_never_a_silent_fallback(monkeypatch):
    with pytest.raises(HardwareError, match=r"cannot run as gluon .as asked.: no Hopper here"):
        choose("rmsnorm", "gluon", OFFERS)
    with pytest.raises(ConfigError, match=r"has no implementation 'tritn'.*did you mean 'triton'"):
        choose("rmsnorm", "tritn", OFFERS)  # type: ignore[arg-type]
    monkeypatch.setenv("CAIRN_KERNELS", "rmsnorm=triton")
    with pytest.raises(HardwareError, match="a tensor is on cpu"):
        rmsnorm(torch.ones(2, 4), torch.ones(4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rmsnrom=triton", "names an operation 'rmsnrom'.*did you mean 'rmsnorm'"),
        ("rmsnorm", "has the entry 'rmsnorm'"),
        ("rmsnorm=cuda", "with one of reference, torch, triton, gluon"),
    ],
)
def test_a_variable_that_means_nothing_is_refused(monkeypatch, text, message):
    monkeypatch.setenv("CAIRN_KERNELS", text)
    with pytest.raises(ConfigError, match=message):
        choose("rmsnorm", "auto", OFFERS)
