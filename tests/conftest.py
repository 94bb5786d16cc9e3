"""What every test shares: no network, few threads, reproducible properties."""

import gc
import os
import shutil
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

# One thread per test process: the suite runs several of them, and a thread pool does not survive the
# fork of `forked.run_ranks`, which would hang.
os.environ["OMP_NUM_THREADS"] = "1"
# Programs of the virtual environment (kubectl) are found as if it were activated.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forking after use would warn
# No test speaks TLS with anybody: a client that read every certificate authority would cost 0.03 to 0.06 s of CPU time.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

import hypothesis
import pytest
import standing_heap

# A shell that runs the suite in the background has it ignore Ctrl-C, and so would every program that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.register_profile("dev", deadline=None, max_examples=50)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Files of a minute and more on two cores. They start first, so that no worker has one left when the others are done;
# those that mostly wait for processes stand between those that compute.
LONG = (
    "kernels/test_interpreted.py",
    "cluster/test_launched_recovery.py",
    "cluster/test_elastic.py",
    "train/recovery/test_local_driver.py",
    "kernels/test_compile.py",
    "cluster/test_ray.py",
    "cluster/test_slurm.py",
    "verify/test_verify_faults.py",
    "train/test_resume_layouts.py",
    "train/checkpoint/test_resume.py",
    "bench/test_throughput.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """What one worker of the suite has compiled, the others copy; so does the next run."""
    cache = getattr(config, "cache", None)
    if (
        cache is not None
        and "CC" not in os.environ
        and sys.platform == "linux"
        and shutil.which("cc")
    ):
        os.environ["KEPT_CC"] = str(cache.mkdir("kept_cc"))
        os.environ["CC"] = str(TESTS / "kept_cc.py")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: nothing of it is garbage while it is collected, nor afterwards."""
    gc.disable()
    try:
        return (yield)
    finally:
        standing_heap.keep()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; a GPU test on a machine without one is skipped with a reason, not failed."""
    places = {TESTS / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))  # stable
    _skip_without_gpu(items)


def _skip_without_gpu(items: list[pytest.Item]) -> None:
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
