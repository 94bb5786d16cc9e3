"""What every test shares: no network, few threads, reproducible properties."""

import os
import signal
import sys
import zlib

# One thread per test process: the suite runs two of them, and a thread pool does not survive the
# fork of `forked.run_ranks`, which would hang.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forking after use would warn

import hypothesis
import pytest

# A shell that runs the suite in the background has it ignore Ctrl-C, and so would every program that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("dev", deadline=None, max_examples=50)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A GPU test on a machine without one is skipped with a reason, not failed."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Random inputs differ from test to test, but not from run to run."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing a test does reaches the user's cache or reads their settings."""
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path_factory.getbasetemp() / "cairn-cache"))
    monkeypatch.setenv("CAIRN_DATA", str(tmp_path_factory.getbasetemp() / "cairn-data"))
    monkeypatch.delenv("CAIRN_EVENTS", raising=False)
