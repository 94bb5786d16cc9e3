"""Kernels compile for sm_90 without a GPU, and the lint catches each way in which one can be bad."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import bad_kernels
import pytest

import cairn.kernels.tooling.catalogue as catalogue
from cairn.core.errors import ConfigError
from cairn.kernels.tooling import build
from cairn.kernels.tooling.compile import compile_variant, fingerprint, signature
from cairn.kernels.tooling.compiled import STAGES, Compiled
from cairn.kernels.tooling.lint import Finding, lint
from cairn.kernels.tuned import TABLES, read_table


def rules(findings: list[Finding]) -> set[str]:
    return {finding.rule for finding in findings if finding.severity == "fail"}


RECORD = Path(__file__).with_name("compiled_well.json")
CARRIED = build.Job("attention", "attention gluon backward keys D128 full ragged")


def sample(kernel: str) -> list[tuple[str, build.Job]]:
    """One variant of each compiled function: all of them take minutes, `cairn kernels check` does that."""
    first = {id(v.function): v for v in reversed(build.variants(kernel))}
    first |= {id(v.function): v for v in build.variants(kernel) if v.name == CARRIED.variant}
    return [(fingerprint(v), build.Job(kernel, v.name)) for v in first.values()]


def known() -> dict[str, str]:
    """Variants that have compiled well, by fingerprint: source, types, options and tools have not changed since."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an earlier run of the suite has compiled, by fingerprint: what has not changed is not compiled again."""
    cache = getattr(request.config, "cache", None)
    return tmp_path_factory.mktemp("compiled") if cache is None else cache.mkdir("kernels")


@pytest.fixture(scope="module")
def compiled(kept: Path) -> dict[str, list[Compiled]]:
    """By kernel, what is not in the record. In a process of its own: a compiler that crashes is a finding."""
    results: dict[str, list[Compiled]] = {kernel: [] for kernel in catalogue.kernels()}
    jobs = [entry for kernel in results for entry in sample(kernel) if entry[0] not in known()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAIRN_CACHE", str(kept))
        list(build.build(list(dict(jobs).values()), workers=1))  # two kernels may share a variant
        for found in build.build([job for _, job in jobs], workers=1):
            results[found.kernel].append(found)
    for path in (kept / "kernels").glob("*.*"):
        if path.stem not in dict(jobs):
            path.unlink()  # of sources that have changed
    return results


@pytest.mark.timeout(400)  # the first pays for all
@pytest.mark.parametrize("kernel", list(catalogue.kernels()))
def test_a_variant_of_each_function_compiles_well(kernel: str, compiled: dict[str, list[Compiled]]):
    new = [job.variant for name, job in sample(kernel) if name not in known()]
    assert sorted(found.variant for found in compiled[kernel]) == sorted(new)
    for found in compiled[kernel]:
        failures = [f"{f.rule}: {f.message}" for f in lint(found) if f.severity == "fail"]
        assert not failures, f"{found.variant}: {failures}"


@pytest.mark.skipif("CAIRN_RECORD_KERNELS" not in os.environ, reason="writes compiled_well.json")
def test_what_compiled_well_is_recorded(compiled: dict[str, list[Compiled]]):
    """CAIRN_RECORD_KERNELS=1 pytest tests/kernels/test_compile.py: after the tests above were green."""
    for found in (one for several in compiled.values() for one in several):
        assert not [finding for finding in lint(found) if finding.severity == "fail"]
    all_of_them = {n: job.variant for k in catalogue.kernels() for n, job in sample(k)}
    RECORD.write_text(json.dumps(dict(sorted(all_of_them.items())), indent=0) + "\n")


@pytest.mark.parametrize("kernel", list(catalogue.kernels()))
def test_every_variant_names_the_arguments_of_its_kernel(kernel: str):
    for variant in build.variants(kernel):
        types = signature(variant)
        assert set(variant.aligned) <= {name for name, kind in types.items() if kind != "constexpr"}


@pytest.fixture(scope="module")
def good() -> Compiled:
    return compile_variant(bad_kernels.GOOD, "matmul")


def test_a_good_kernel_has_every_stage_and_no_findings(good: Compiled):
    assert lint(good) == []
    assert set(good.stages) == set(STAGES)
    assert all(good.stages.values())
    assert set(good.stage_ms) == {"front end", "ttir", "ttgir", "llir", "ptx", "cubin"}
    assert all(ms > 0 for ms in good.stage_ms.values())
    assert good.mix["tensor core"] > 0
    assert good.multiplies
    assert (good.warps, good.shared_bytes) == (8, 3 * 2 * (128 * 64 + 64 * 128))
    assert 0 < good.registers <= 255
    assert good.occupancy is not None
    assert good.occupancy.blocks >= 1
    assert [source.text.splitlines()[0] for source in good.sources] == ["@triton.jit"]


@pytest.mark.parametrize(
    ("variant", "rule"),
    [
        (bad_kernels.SPILLS, "spills"),
        (bad_kernels.SERIALISED, "serialised"),
        (bad_kernels.TOO_MUCH_SHARED, "shared_memory"),
        (bad_kernels.FORGOTTEN_BARRIER, "barriers"),
        (bad_kernels.ORDINARY_CORES, "tensor_cores"),
        (bad_kernels.ONLY_MMA, "tensor_cores"),
        (bad_kernels.BROKEN, "compiles"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_bad_kernel_is_caught(variant, rule):
    assert rule in rules(lint(compile_variant(variant)))


def test_a_barrier_that_is_used_keeps_its_memory():
    assert "barriers" not in rules(lint(compile_variant(bad_kernels.USED_BARRIER)))


def test_a_kernel_that_does_not_compile_says_why():
    compiled = compile_variant(bad_kernels.BROKEN)
    assert "incompatible dimensions" in (compiled.error or "")
    assert compiled.stages == {}
    starved = bad_kernels.GOOD._replace(options={"num_warps": 4, "num_stages": 2, "maxnreg": 24})
    assert "Insufficient registers" in (compile_variant(starved).error or "")


def test_a_variant_with_wrong_arguments_names_them():
    wrong = bad_kernels.GOOD._replace(types={"a": "*bf16", "x": "i32"})
    with pytest.raises(ConfigError, match=r"gives x .* leaves out b, c, M, N, K"):
        signature(wrong)
    assert "leaves out b, c" in (compile_variant(wrong).error or "")


def test_a_fingerprint_follows_what_decides_the_machine_code():
    same = bad_kernels.GOOD._replace(constants=dict(reversed(bad_kernels.GOOD.constants.items())))
    assert fingerprint(same) == fingerprint(bad_kernels.GOOD)
    others = [
        bad_kernels.GOOD._replace(options={"num_warps": 4}),
        bad_kernels.GOOD._replace(constants={**bad_kernels.GOOD.constants, "BK": 32}),
        bad_kernels.GOOD._replace(types={**bad_kernels.GOOD.types, "a": "*fp16"}),
        bad_kernels.GOOD._replace(aligned=()),
        bad_kernels.GOOD._replace(function=bad_kernels.by_tiles),
    ]
    assert len({fingerprint(variant) for variant in (bad_kernels.GOOD, *others)}) == 6


def test_fingerprints_agree_between_processes():
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import bad_kernels\n"
        "from cairn.kernels.tooling.compile import fingerprint; print(fingerprint(bad_kernels.GOOD))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fingerprint(bad_kernels.GOOD)


def test_a_process_that_interprets_does_not_compile(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="interpreted in this process"):
        compile_variant(bad_kernels.GOOD)


def test_a_head_of_a_group_goes_on_where_the_last_one_stopped(compiled, kept, monkeypatch):
    """The front end once lost a number that is carried around two loops, and every head began at step 0."""
    monkeypatch.setenv("CAIRN_CACHE", str(kept))
    text = build.build_one(CARRIED).stages["ttgir"]
    loops = [line.split("scf.for %now = ")[1] for line in text.splitlines() if "%now = " in line]
    assert len(loops) == 2  # two warpgroups
    assert not [loop for loop in loops if loop.startswith("%c0")]


def test_every_kernel_is_compiled():
    """Also the small ones beside a large one, and each entry of the tables that ship."""
    compiled = set()
    for kernel in catalogue.kernels():
        for variant in build.variants(kernel):
            function = variant.function.fn
            compiled.add((function.__module__, function.__name__))
    for path in catalogue.sources():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("kernel"):
                assert (catalogue.module_of(path), node.name) in compiled
    with_tables = {name for path in TABLES.glob("*.json") for name in read_table(path).kernels}
    for name in with_tables - {"linear_cross_entropy"}:  # whose table has no launch in it
        assert hasattr(catalogue.load(name), "tuned_variants"), name
