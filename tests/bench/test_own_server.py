"""A server that lives as long as a load test: it is there, it is gone afterwards, and its death has a reason."""

import os
import urllib.request

import pytest

from cairn.bench.own_server import started
from cairn.core.errors import CairnError, UsageError

TINY = ["random:tiny", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "64"]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_answers_and_is_gone_afterwards_also_when_the_test_fails(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said = []
    with pytest.raises(ZeroDivisionError), started(TINY, said.append) as served:  # noqa: PT012
        assert alive(served.pid)
        with urllib.request.urlopen(f"{served.url}/v1/models") as response:
            assert b"random:tiny" in response.read()
        assert served.ready_s > 0
        raise ZeroDivisionError
    assert not alive(served.pid)
    assert any(served.url in line for line in said)
    assert said[-1] == "stopped"  # it was asked to, and drained


def test_a_server_that_cannot_start_says_why():
    with (
        pytest.raises(CairnError, match="before it was ready") as failure,
        started(["random:tniy"]),
    ):
        pass
    assert "status 2" in failure.value.message
    assert "tniy" in failure.value.message


@pytest.mark.parametrize("flag", ["--port", "--port=8000", "--host"])
def test_the_port_is_chosen_here(flag):
    with pytest.raises(UsageError, match=flag), started(["random:tiny", flag]):
        pass
