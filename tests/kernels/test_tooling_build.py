"""What is known about a kernel is kept, and a compiler that crashes takes nothing else along."""

import importlib
import os
import textwrap

import pytest

from cairn.core.errors import CairnError, UsageError
from cairn.kernels.tooling import build, catalogue
from cairn.kernels.tooling.build import Job
from cairn.kernels.tooling.lint import lint

SOURCE = '''
"""A kernel for this test."""
import triton
import triton.language as tl
from cairn.kernels.kernel import Variant

SCALE = tl.constexpr(2.0)

@triton.jit
def double(x, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(x + place, tl.load(x + place) * SCALE)

VARIANTS = [
    Variant("double 64", double, {"x": "*fp32"}, {"N": 64}),
    Variant("double 128", double, {"x": "*fp32"}, {"N": 128}),
]

def cases():
    yield from ()
'''


DEADLY = """
import os
from cairn.kernels.tooling.compiled import Compiled

def facts(job):
    if job.variant == "dies":
        os._exit(9)
    return Compiled(kernel=job.kernel, variant=job.variant)
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A catalogue of one kernel, which worker processes find, too."""
    package = tmp_path / "made_up.py"
    package.write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "cache"))
    entry = catalogue.Entry("made_up", "made_up", "A kernel for this test.", False)
    monkeypatch.setattr(catalogue, "kernels", lambda: {"made_up": entry})
    return "made_up"


def test_what_is_built_is_kept(kernel, monkeypatch):
    job = Job(kernel, "double 64")
    assert build.read(job, texts=False) is None
    first = build.build_one(job)
    assert first.error is None
    assert build.build_one(job) == first
    [facts] = build.build([job])
    assert facts == first.without_texts()
    assert lint(facts) == []
    monkeypatch.setattr(build, "_build_and_keep", lambda job: pytest.fail("it was there"))
    assert build.build_one(job) == first
    with pytest.raises(pytest.fail.Exception):
        build.build_one(job, fresh=True)


def test_what_is_kept_answers_for_another_kernel_that_ships_the_same(kernel, monkeypatch):
    build.build_one(Job(kernel, "double 64"))
    entry = catalogue.kernels()[kernel]
    monkeypatch.setattr(catalogue, "kernels", lambda: {kernel: entry, "another": entry})
    for texts in (True, False):
        found = build.read(Job("another", "double 64"), texts=texts)
        assert found is not None
        assert found.kernel == "another"


@pytest.mark.parametrize("suffix", [".json", ".texts"])
def test_a_damaged_cache_is_built_again(kernel, suffix):
    job = Job(kernel, "double 64")
    first = build.build_one(job)
    build._path(job).with_suffix(suffix).write_bytes(b"damaged")
    assert build.build_one(job).stages["sass"] == first.stages["sass"]
    assert build.read(job, texts=True) is not None


def test_a_cache_that_cannot_be_written_costs_only_time(kernel, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert build.build_one(Job(kernel, "double 64")).error is None


@pytest.mark.parametrize("workers", [1, 2])
def test_a_crash_of_the_compiler_is_a_finding(monkeypatch, tmp_path, workers):
    (tmp_path / "deadly.py").write_text(textwrap.dedent(DEADLY))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(build, "_facts", importlib.import_module("deadly").facts)
    monkeypatch.setattr(build, "read", lambda job, texts: None)
    jobs = [Job("k", name) for name in ("one", "dies", "two", "three")]
    found = {c.variant: c for c in build.build(jobs, workers=workers)}
    assert set(found) == {"one", "dies", "two", "three"}
    assert [name for name, c in found.items() if c.error] == ["dies"]
    assert "ended its own process" in lint(found["dies"])[0].message


def test_a_worker_that_raises_answers_for_its_job_alone(kernel):
    assert build._facts(Job(kernel, "double 64")).error is None
    assert "no variant 'triple'" in (build._facts(Job(kernel, "triple")).error or "")


def test_an_unknown_variant_is_an_error(kernel):
    with pytest.raises(CairnError, match="no variant 'triple'"):
        build.build_one(Job(kernel, "triple"))


def test_two_variants_of_one_name_are_an_error(kernel, monkeypatch):
    module = catalogue.load(kernel)
    monkeypatch.setattr(module, "VARIANTS", [module.VARIANTS[0]] * 2)
    with pytest.raises(ValueError, match="several of the name double 64"):
        build.jobs([kernel])


def test_the_catalogue_finds_every_file_of_cases(tmp_path):
    (tmp_path / "cases").mkdir()
    (tmp_path / "norm").mkdir()
    for name, more in {"one": "", "two": "def tuning(): ...\n"}.items():
        (tmp_path / "norm" / f"{name}.py").write_text(f'"""{name.title()}.\n\nMore."""\n')
        text = f'KERNEL = "cairn.kernels.norm.{name}"\nVARIANTS = []\ndef cases(): ...\n'
        (tmp_path / "cases" / f"{name}.py").write_text(text + more)
    (tmp_path / "cases" / "one_variants.py").write_text('"""Helps."""\nVARIANTS = []\n')
    found = catalogue.kernels(tmp_path)
    assert {name: (entry.line, entry.tunable) for name, entry in found.items()} == {
        "one": ("One.", False),
        "two": ("Two.", True),
    }


def test_every_kernel_says_in_one_line_what_it_is():
    for name, entry in catalogue.kernels().items():
        assert entry.line.endswith((".", ":", ",")), name


def test_an_unknown_kernel_is_a_usage_error():
    known = next(iter(catalogue.kernels()))
    with pytest.raises(UsageError) as raised:
        catalogue.chosen([known[:-1]])
    assert raised.value.hint == f"did you mean '{known}'?"
