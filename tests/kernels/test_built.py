"""Kernels compiled ahead: launches seen without a GPU, built in one process, found in another."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton import knobs

from cairn.core.errors import ConfigError, UsageError
from cairn.kernels import built
from cairn.kernels.norm.rmsnorm import rmsnorm
from cairn.kernels.tooling.absent_gpu import absent_gpu
from cairn.kernels.tooling.build_ahead import by_hash, write_manifest

GPU = "NVIDIA H200"


def norm(columns: int, dtype: torch.dtype = torch.bfloat16, offset: int = 0):
    memory = torch.empty(offset + 4 * columns, dtype=dtype, device="cuda")
    rmsnorm(
        memory[offset:].view(4, columns), torch.empty(columns, dtype=dtype, device="cuda"), 1e-6
    )


def launches_of_norms():
    with absent_gpu(GPU) as launches:
        norm(64)
    return launches


def test_a_launch_is_seen_once_for_each_specialisation():
    with absent_gpu(GPU) as launches:
        norm(64)
        norm(64)
        assert len(launches) == 1
        norm(128)
        norm(64, torch.float16)
        assert len(launches) == 3
        norm(64, offset=1)  # no multiple of 16 bytes: Triton compiles that anew
        assert len(launches) == 4
    assert len(by_hash(launches)) == 4
    assert {launch.target.arch for launch in launches} == {90}


def test_the_absent_gpu_is_gone_afterwards():
    with absent_gpu(GPU):
        x = torch.ones(3, device="cuda")
        assert x.is_cuda
        assert x.device == torch.device("cuda", 0)
        assert x[1:].is_cuda
        assert torch.cuda.get_device_capability() == (9, 0)
        assert not torch.ones(3).is_cuda
    assert not torch.cuda.is_initialized()
    assert torch.ones(3).sum().item() == 3


@pytest.mark.parametrize(("gpu", "architecture"), [("no such GPU", "sm_90"), (GPU, "sm_10")])
def test_an_unknown_gpu_is_refused(gpu, architecture):
    with pytest.raises(UsageError), absent_gpu(gpu, architecture):
        pass


CHILD = """
import json, sys, torch
from pathlib import Path
import triton
from cairn.kernels import built
sys.path.insert(0, sys.argv[2])
import test_built
lookups = built.use(Path(sys.argv[1]))
assert triton.runtime.cache.triton_key() == lookups.manifest.triton_key
assert not hasattr(triton.runtime.cache.triton_key, "cache_info")
compiled = []
triton.knobs.compilation.listener = lambda **seen: None if seen["cache_hit"] else compiled.append(seen["src"].name)
for launch in test_built.launches_of_norms():
    found = triton.compile(launch.source, target=launch.target, options=launch.options)
    assert not [name for name in found.metadata_group if name.startswith("__grp__")]
before = lookups.note()
with test_built.absent_gpu(test_built.GPU) as more:
    test_built.norm(128)
triton.compile(more[0].source, target=more[0].target, options=more[0].options)
print(json.dumps([compiled, lookups.found, before, lookups.note()]))
"""


# What other tests of this process have patched would enter Triton's keys, so it builds in one of its own, as users do.
BUILDER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_built as t
from cairn.kernels.tooling.build_ahead import build_here
out = Path(sys.argv[1])
build_here(t.by_hash(t.launches_of_norms()), out)
made = t.write_manifest(out, "sm_90", t.GPU, ["norms"])
print(made.kernels, made.launchers)
"""


def test_what_one_process_builds_another_finds(tmp_path: Path):
    here = str(Path(__file__).parent)
    first = str(tmp_path / "first")
    built = subprocess.run(
        [sys.executable, "-c", BUILDER, first, here], capture_output=True, text=True
    )
    assert built.stdout.splitlines()[-1:] == ["1 1"], built.stderr
    folder = (tmp_path / "first").rename(tmp_path / "moved")  # as an image's layers are
    modules = [path.read_bytes() for path in folder.glob("*/*.so")]
    assert len(modules) == 2
    assert all(
        b"libcuda.so.1" in module for module in modules
    )  # of the driver, when they are loaded
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "own")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), here],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    compiled, found, before, after = json.loads(done.stdout.splitlines()[-1])
    assert found == 1
    assert before.endswith("none compiled here")
    assert compiled == ["_rmsnorm_kernel"]  # the one of 128 columns, which nobody built
    assert "1 compiled here (_rmsnorm_kernel): it was built for norms on NVIDIA H200" in after
    assert list(folder.glob("*/_rmsnorm_kernel.cubin"))
    assert list((tmp_path / "own").glob("*/_rmsnorm_kernel.cubin"))


def test_a_folder_that_was_not_built_is_an_error_or_a_note(tmp_path, monkeypatch, capsys):
    with pytest.raises(ConfigError, match="holds no kernels"):
        built.use_configured(str(tmp_path))
    monkeypatch.setenv(built.ENVIRONMENT, str(tmp_path / "none"))
    assert built.use_configured(None) is None
    assert "kernels are compiled here" in capsys.readouterr().err
    monkeypatch.delenv(built.ENVIRONMENT)
    assert built.use_configured(None) is None
    assert knobs.cache.manager_class is not built._BuiltCache


def test_another_version_is_named_as_the_reason(tmp_path):
    made = write_manifest(tmp_path, "sm_90", GPU, ["qwen3-8b"])
    lookups = built.Lookups(tmp_path, made)
    lookups.missed.append("_rope_kernel")
    assert lookups.note().endswith("it was built for qwen3-8b on NVIDIA H200")
    old = built.Lookups(tmp_path, built.msgspec.structs.replace(made, triton="3.1.0"))
    old.missed.append("_rope_kernel")
    assert "built with Triton 3.1.0" in old.note()
