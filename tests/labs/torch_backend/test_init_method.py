"""`cairn://`: where ranks meet, and what each of them hears when they cannot."""

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import cairn.labs.torch_backend  # noqa: F401  registers it
from cairn.comm.bench_ranks import run_ranks
from cairn.labs.torch_backend import CommError
from cairn.labs.torch_backend.init_method import rendezvous

SOON = timedelta(seconds=6)  # what a rank waits for nothing; a busy machine connects within it
LONG = timedelta(seconds=60)


def meets(rank, world, tell, where, timeout, environment):
    """The sum of the ranks, or what this one heard."""
    os.environ.update(environment | {"RANK": str(rank)})
    try:
        dist.init_process_group("cairn", init_method=where, timeout=timeout)
        x = torch.full((3,), float(rank + 1))
        dist.all_reduce(x)
        return x.tolist()
    except CommError as error:
        return type(error).__name__, str(error)


@pytest.fixture
def agent():
    """A store that is there already, as torchrun has one: the environment for ranks that use it."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    del store


def test_they_meet_where_the_environment_says(agent):
    assert run_ranks(2, meets, "cairn://", LONG, agent, timeout_s=120) == [[3.0] * 3] * 2


def test_a_rank_that_never_comes_is_named(agent):
    """Two are here, and three are meant."""
    found = run_ranks(2, meets, "cairn://", SOON, agent | {"WORLD_SIZE": "3"}, timeout_s=120)
    for name, text in found:
        assert name in ("CommTimeout", "GroupStopped")
        assert "rank 2 of 3 to join" in text


def test_a_port_that_somebody_else_has_is_an_error_on_every_rank():
    """Rank 0 cannot listen there; rank 1 gets through, and no answer."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        where = f"cairn://127.0.0.1:{stranger.getsockname()[1]}"
        (first, said), (second, on_message) = run_ranks(
            2, meets, where, SOON, {"WORLD_SIZE": "2"}, timeout_s=120
        )
    assert first == "CommError"
    assert said.startswith("init: rank 0 cannot listen on 127.0.0.1:")
    assert "address already in use" in said
    assert second == "CommTimeout"
    assert on_message.startswith("init: rank 1 had no answer from 127.0.0.1:")
    assert "within 6 s" in on_message


@pytest.mark.parametrize(
    ("where", "environment", "said"),
    [
        ("cairn://", {}, "None is no rank"),
        ("cairn://", {"RANK": "0"}, "None is no world size"),
        ("cairn://", {"RANK": "x", "WORLD_SIZE": "2"}, "'x' is no rank"),
        ("cairn://", {"RANK": "0", "WORLD_SIZE": "2"}, "None is no port"),
        ("cairn://", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "address of rank 0"),
        ("cairn://h:1?rank=2&world_size=2", {}, "rank 2 of a world of 2"),
    ],
)
def test_what_is_missing_is_said(monkeypatch, where, environment, said):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommError, match=said):
        next(rendezvous(where))
