"""`cairn bench throughput` and `cairn profile serve` on real engines of tiny models: rows, records, mistakes."""

import contextlib
import json
import subprocess
import sys

import msgspec
import pytest
import torch

from cairn.bench import context, engine_run, profile_serve, record, throughput
from cairn.bench.engine_run import serve
from cairn.bench.profiled_kernels import ProfileWindow
from cairn.bench.workload import requests, totals
from cairn.cli.bench import bench as verb
from cairn.cli.profile import profile as profile_verb
from cairn.core.errors import ConfigError, DataError, UsageError
from cairn.kernels.tooling.measure import Ceiling
from cairn.models.cache import cache_bytes
from cairn.models.presets import preset
from cairn.serve.engine.scheduler import Scheduler

CEILING = Ceiling(device="a CPU", bytes_per_s=1e10, flops_per_s={"fp32": 1e11})
PROMISED = {"shape", "workload", "dtype", "output_tokens_per_s", "input_tokens_per_s", "seconds", "median_seconds",
            "fraction_of_limit", "limit_seconds", "steps", "ledger"}  # fmt: skip
SMALL = ["--shape", "tiny-qwen3", "--device", "cpu", "--dtype", "float32", "--scale", "0.01"]


@pytest.fixture(autouse=True)
def ceiling(monkeypatch):
    """Known at once: measuring it is tested elsewhere. In a large process a collection takes half a second."""
    monkeypatch.setattr(throughput, "measure_ceiling", lambda device, dtype: CEILING)
    monkeypatch.setattr(engine_run, "quiet_collector", contextlib.nullcontext)
    monkeypatch.setattr(context, "quiet_collector", contextlib.nullcontext)
    monkeypatch.setattr(throughput, "release", lambda: None)


def run(*args: str) -> int:
    return verb.run(["throughput", *SMALL, *args])


def test_synthetic_acceptance_brings_the_length_that_is_asked_for(capsys):
    drafts = [
        "--synthetic-acceptance",
        "3.0",
        "--speculate",
        "ngram",
    ]  # 4 drafts, as for any short length
    args = ["--workload", "latency", "--repeats", "1", "--scale", "0.5", "--max-num-seqs", "1"]
    assert run(*args, *drafts, "--json", "--commit", "abc") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["speculate"], row["draft_tokens"], row["failure"]) == ("ngram", 4, None)
    assert sum(row["synthetic_acceptance"]) == pytest.approx(2.0)
    assert row["acceptance_length"] == pytest.approx(3.0, abs=0.5)
    for wrong in (
        drafts[:2],
        [*drafts[:2], "--speculate", "off"],
        [*drafts, "--draft-tokens", "1"],
    ):
        with pytest.raises(UsageError, match="synthetic"):
            run(*args, *wrong)


def test_context_times_one_request_by_its_length(capsys, tmp_path):
    out = tmp_path / "context.json"
    small = ["--shape", "tiny-qwen3", "--device", "cpu", "--dtype", "float32", "--output-len", "4"]
    words = ["context", *small, "--out", str(out), "--merge", "--commit", "abc", "--lengths"]
    stretched = preset("tiny-qwen3").context + 40
    for lengths in (["24"], ["6", str(stretched)]):
        assert verb.run([*words, *lengths]) == 0
    rows = context.read(out).rows
    assert [row.length for row in rows] == [24, 6, stretched]
    for row in rows:
        assert row.failure is None
        assert row.ttft_s > row.ttft_floor_s > 0
        assert row.tpot_s > row.tpot_floor_s > 0
    assert rows[2].ttft_floor_s > rows[0].ttft_floor_s
    assert "per token" in capsys.readouterr().out
    for wrong in (["--lengths", "0"], ["--output-len", "1"], ["--merge"]):
        with pytest.raises(UsageError):
            verb.run(["context", *small, *wrong])


def test_json_is_one_document_with_what_is_promised(capsys):
    assert run("--workload", "all", "--repeats", "2", "--json", "--commit", "abc") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert {"command", "commit", "date", "device", "versions", "ceilings", "rows"} == set(document)
    assert document["command"].startswith("cairn bench throughput --shape tiny-qwen3")
    assert "--json" not in document["command"]
    rows = document["rows"]
    assert [row["workload"] for row in rows] == ["nano", "latency", "prefill", "decode", "shared"]
    for row in rows:
        assert row.keys() >= PROMISED
        assert row["failure"] is None
        assert 0 < row["seconds"] <= row["median_seconds"]
        asked = totals(requests(row["workload"], 0.01))
        assert (row["input_tokens"], row["output_tokens"]) == (
            asked.input_tokens,
            asked.output_tokens,
        )
        assert row["output_tokens_per_s"] * row["seconds"] == pytest.approx(row["output_tokens"])
        assert row["input_tokens_per_s"] * row["seconds"] == pytest.approx(row["input_tokens"])
        assert row["fraction_of_limit"] * row["seconds"] == pytest.approx(row["limit_seconds"])
        assert row["scale"] == 0.01
        assert row["threads"] == torch.get_num_threads()
        assert any("scale 0.01" in note for note in row["notes"])
        assert any("modulo" in note for note in row["notes"])
        assert set(row["ledger"]) == {"schedule_ms", "launch_ms", "wait_ms", "update_ms"}
    printed = captured.err.strip().splitlines()
    speeds, steps = printed[-14:-8], printed[-6:]  # a blank line and a sentence between them
    for table, third in ((speeds, "type"), (steps, "steps")):
        assert table[0].split()[:3] == ["shape", "workload", third]
        assert [line.split()[1] for line in table[1:]] == [row["workload"] for row in rows]


def test_a_run_begins_with_an_empty_prefix_cache(monkeypatch):
    """What the same requests left behind a moment ago must not make the next run faster."""
    setup = throughput.ThroughputSetup(shape="tiny-qwen3", model="random:tiny-qwen3", device="cpu", dtype="float32",
                             scale=0.02, repeats=2)  # fmt: skip
    bench = throughput.prepare(setup)
    asked, hits = [], []
    allocate = type(bench.engine.scheduler.blocks).allocate

    def watched(blocks, request, upto):
        fresh = not request.blocks
        pages = allocate(blocks, request, upto)
        if fresh and pages is not None:
            asked.append(request.id)
            hits.append(request.computed)
        return pages

    monkeypatch.setattr(type(bench.engine.scheduler.blocks), "allocate", watched)
    throughput.measure(bench, "nano")
    assert len(asked) == 4 * 6  # two warm-ups, two repeats
    assert set(hits) == {0}
    hits.clear()
    throughput.measure(bench, "shared")
    assert hits.count(0) == 4  # the first request of each run
    assert set(hits) == {0, 32}  # 36 tokens are shared: two whole pages


def test_turns_follow_each_other_and_find_what_was_said_in_the_cache():
    setup = throughput.ThroughputSetup(shape="tiny-qwen3", model="random:tiny-qwen3", device="cpu", dtype="float32",
                             scale=0.3, repeats=1, cold=True, workloads=["turns"])  # fmt: skip
    bench = throughput.prepare(setup)
    chosen, _ = throughput.choose_requests("turns", 0.02, bench.spec)
    chosen = [one._replace(follows=None if at < 2 else at - 2) for at, one in enumerate(chosen)]
    seen = {}
    add = bench.engine.add
    bench.engine.add = lambda request: (seen.update({request.id: request}), add(request))
    run = serve(bench.engine, chosen)
    assert run.failure is None
    for at, one in enumerate(chosen):
        assert len(seen[at].outputs) == one.output
        if one.follows is not None:
            last = seen[one.follows]
            assert seen[at].prompt == [*last.prompt, *last.outputs, *one.prompt]
            assert seen[at].ledger.arrived >= last.ledger.finished


def test_the_first_run_of_a_fresh_engine_stands_beside_the_best(capsys):
    args = ["--workload", "agents", "logprobs", "--cold", "--repeats", "1", "--json"]
    assert run(*args, "--commit", "abc") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["workload"] for row in rows] == ["agents", "logprobs"]
    for row in rows:
        assert row["first_of_warm"] == pytest.approx(row["seconds"] / row["first_seconds"])
        assert row["ready_seconds"] > 0
        assert row["failure"] is None


def test_documents_are_cut_to_the_context():
    spec = preset("tiny-qwen3")
    chosen, notes = throughput.choose_requests("long", 0.2, spec)
    assert {one.length + one.output for one in chosen} == {spec.context}
    assert notes[0] == f"prompts cut to the context of {spec.context} tokens"


def test_a_request_that_fails_is_a_row_that_says_so(monkeypatch, capsys):
    update = Scheduler.update

    def losing(self, step, sampled):
        if step.number == 18:  # behind the warm-ups
            return self.fail(step, "OutOfMemoryError: the device is full")
        return update(self, step, sampled)

    monkeypatch.setattr(Scheduler, "update", losing)
    assert run("--workload", "nano", "latency", "--repeats", "1") == 1
    out = capsys.readouterr().out
    assert "tiny-qwen3 nano: FAILED: 3 of 3 requests did not finish" in out
    assert "OutOfMemoryError: the device is full" in out
    (measured,) = (line for line in out.splitlines() if "tiny-qwen3 latency: " in line)
    assert "output tokens/s" in measured
    assert out.splitlines()[-1].split()[:2] == ["tiny-qwen3", "latency"]  # steps of what ran


def test_merge_keeps_what_was_not_measured_again(tmp_path):
    out = tmp_path / "deep" / "throughput.json"
    args = ["--repeats", "1", "--out", str(out)]
    assert run(*args, "--workload", "nano", "latency", "--commit", "old") == 0
    assert run(*args, "--workload", "latency", "--commit", "new", "--merge") == 0
    rows = throughput.read(out).rows
    assert [(row.workload, row.commit) for row in rows] == [("nano", "old"), ("latency", "new")]
    assert run(*args, "--workload", "latency", "--commit", "new") == 0
    assert [row.workload for row in throughput.read(out).rows] == ["latency"]
    out.write_text("{}")
    with pytest.raises(DataError, match=r"throughput\.json"):
        run(*args, "--merge", "--commit", "new")


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        (["--workload", "nan"], UsageError, "no workload 'nan'"),
        (["--shape", "qwen3-0.6"], ConfigError, "no model shape is called 'qwen3-0.6'"),
        (["--scale", "2"], UsageError, "--scale is 2"),
        (["--repeats", "0"], UsageError, "--repeats is 0"),
        (["--merge"], UsageError, "--merge is given without --out"),
        (["--shape", "tiny", "--model", "x"], UsageError, "both --model and --shape"),
        (["--shape", "tiny-qwen3", "--scale", "1"], UsageError, "the context is 256"),
    ],
)
def test_mistakes(args, error, words):
    with pytest.raises(error, match=words):
        verb.run(["throughput", "--device", "cpu", "--dtype", "float32", *args])


def test_without_git_the_commit_has_to_be_given(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "current_commit", lambda: None)
    with pytest.raises(UsageError, match="commit that is measured is unknown"):
        run("--out", str(tmp_path / "x.json"))


def test_a_profile_has_ledgers_kernels_and_a_timeline(tmp_path, capsys):
    out = tmp_path / "trace.json"
    assert profile_verb.run(["serve", *SMALL, "--out", str(out), "--steps", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [ledger["kind"] for ledger in document["ledgers"]] == ["prefill", "decode"]
    assert sum(ledger["steps"] for ledger in document["ledgers"]) == document["steps"]
    for ledger in document["ledgers"]:
        parts = {part["part"]: part for part in ledger["parts"]}
        assert list(parts) == ["schedule", "launch", "wait", "update", "step"]
        assert parts["launch"]["floor_ms"] == parts["step"]["floor_ms"] > 0
        assert parts["schedule"]["floor_ms"] == 0
        assert parts["step"]["share"] == 1
        names = {kernel["name"] for kernel in ledger["kernels"]}
        assert "aten::mm" in names or "aten::addmm" in names
        assert sum(kernel["share"] for kernel in ledger["kernels"]) == pytest.approx(1)
    _check_timeline(json.loads(out.read_text())["traceEvents"])
    text = profile_verb.text(msgspec.convert(document, profile_serve.Profile), top=3)
    assert "prefill: 1 steps" in text
    assert "above it" in text
    assert f"wrote {out}" in text


def _check_timeline(events: list[dict]) -> None:
    """Operations of the profiler lie within the launches of the loop: the two clocks agree."""
    spans = [event for event in events if event["ph"] == "X"]
    launches = [event for event in spans if event["name"] == "launch"]
    products = [event for event in spans if event["name"] == "aten::mm"]
    assert products
    slack_us = 1000.0  # of the profiler's clock
    for one in products:
        assert any(
            launch["ts"] - slack_us <= one["ts"] <= launch["ts"] + launch["dur"] + slack_us
            for launch in launches
        )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--workload", "all"], "a profile is of one workload"),
        (["--steps", "0"], "--steps is 0"),
        (["--shape", "tiny", "--model", "x"], "both --model and --shape"),
        (["--workload", "x"], "no workload 'x'"),
        (["--out", "/dev/null/x"], "cannot write /dev/null/x"),
        (["--out", "/"], "it is a folder"),
    ],
)
def test_mistakes_in_a_profile(args, words):
    with pytest.raises(UsageError, match=words) as caught:
        profile_verb.run(["serve", "--device", "cpu", *args])
    assert "all" not in (caught.value.hint or "").split(", ")  # which it would refuse as well


def test_the_floor_of_a_step_is_that_of_its_chunks():
    setup = throughput.ThroughputSetup(
        shape="tiny-qwen3", model="random:tiny-qwen3", device="cpu", dtype="float32"
    )
    bench = throughput.prepare(setup)
    scheduler = profile_serve.WatchedStep(bench.engine.scheduler)
    bench.engine.scheduler = scheduler
    throughput.serve(bench.engine, throughput.choose_requests("latency", 0.02, bench.spec)[0])
    spec = bench.spec
    first, second = scheduler.decided[:2]
    flops = spec.forward_flops(3, logits=1) / 1e11
    assert profile_serve.floor_s(bench, first.chunks) == max(
        flops, (spec.matmul_parameters() * 4 + cache_bytes(spec, 3, 4)) / 1e10
    )
    assert (
        profile_serve.floor_s(bench, second.chunks)
        == (spec.matmul_parameters() * 4 + cache_bytes(spec, 4, 4)) / 1e10
    )


def test_the_help_needs_no_torch():
    code = (
        "import sys\nfrom cairn.cli.main import main\n"
        "for verb in (['bench', 'throughput'], ['profile', 'serve']):\n"
        "    assert main([*verb, '--help']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--workload" in done.stdout


def test_what_ran_at_the_same_time_keeps_the_device_busy_once():
    """Two streams, a kernel inside another, and a gap; in any order."""
    ran = [("a", 100, 50, 1), ("b", 120, 80, 2), ("c", 130, 10, 1), ("d", 300, 25, 1)]
    assert ProfileWindow(1, [], ran).busy_s() == ProfileWindow(1, [], ran[::-1]).busy_s() == 125e-9
