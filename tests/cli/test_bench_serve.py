"""`cairn bench serve` as a person runs it: against a server on loopback, from flags to files."""

import asyncio
import json
import os
import subprocess
import sys

import pytest
from mock_openai import Reply, running

from cairn.bench.load_row import read
from cairn.bench.serve_bench import LoadProgress, find_vocabulary
from cairn.cli.bench.load_options import BenchServe, read_setup
from cairn.cli.bench.load_progress import line
from cairn.cli.main import main
from cairn.core.errors import UsageError


def bench(*args):
    return main(["bench", "serve", *map(str, args)])


def test_a_sweep_from_flags_to_files(tmp_path, capsys):
    report, out, lines = tmp_path / "out.html", tmp_path / "serve.json", tmp_path / "records.jsonl"
    with running([Reply(gap_s=0.001)]) as server:
        status = bench(
            "--url", server.url, "--rate", 200, 400, "--num-requests", 20, "--input-len", 9, "--output-len", 4,
            "--html", report, "--out", out, "--records", lines, "--slo-ttft-ms", 60000, "--commit", "abc",
        )  # fmt: skip
    assert status == 0
    bodies = server.bodies
    assert len(bodies) == 4 + 2 * 20
    assert {(body["model"], len(body["prompt"]), body["max_tokens"]) for body in bodies} == {
        ("mock", 9, 4)
    }
    assert len({tuple(body["prompt"]) for body in bodies}) == len(bodies)  # no prompt twice
    document = read(out)
    assert [(row.rate, row.completed, row.output_tokens) for row in document.rows] == [
        (200.0, 20, 80),
        (400.0, 20, 80),
    ]
    assert all(row.holds_slo for row in document.rows)
    assert "--html" not in document.command
    assert "--rate 200 400" in document.command
    assert report.read_text().count("<svg") == 5 + 2 * 6
    records = [json.loads(text) for text in lines.read_text().splitlines()]
    assert len(records) == 40
    assert records[0]["due_s"] == 0
    assert "400/s poisson" in capsys.readouterr().out


def test_the_vocabulary_is_asked_for_where_the_model_is_named_too():
    with running([Reply()]) as server:
        assert (
            bench("--url", server.url, "--model", "mock", "--rate", 200, "--num-requests", 1) == 0
        )
    assert server.heads[0].startswith("GET /cairn/model ")
    assert not any(head.startswith("GET /v1/models") for head in server.heads)


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [
        (200, b'{"vocabulary": 512}', 512),
        (404, b"{}", None),
        (200, b"{}", None),
        (200, b'{"vocabulary": "many"}', None),
        (200, b"<html>", None),
    ],
)
def test_the_vocabulary_of_a_server_that_may_not_say(status, body, found):
    class Client:
        async def get(self, path):
            assert path == "/cairn/model"
            return status, body

    assert asyncio.run(find_vocabulary(Client())) == found


def test_a_closed_loop_as_json_with_failures(capsys):
    with running([Reply()] * 4 + [Reply(), Reply(status=503)] * 15) as server:
        assert (
            bench(
                "--url",
                server.url,
                "--concurrency",
                3,
                "--num-requests",
                20,
                "--endpoint",
                "chat",
                "--json",
            )
            == 0
        )
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["requests"], row["completed"], row["errors"]) == (20, 10, {"http 503": 10})
    assert server.most_running <= 3
    assert server.heads[0].startswith("GET /v1/models")
    assert isinstance(server.bodies[0]["messages"][0]["content"], str)


def test_a_trace_is_replayed_in_its_order(tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [dict(timestamp=10 * n, input_length=5 + n, output_length=2) for n in range(8)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    with running() as server:
        assert bench("--url", server.url, "--dataset", "trace", trace, "--warmup", 1) == 0
    assert sorted(len(body["prompt"]) for body in server.bodies[1:]) == [5 + n for n in range(8)]


def test_the_first_run_stands_beside_the_warm_one(capsys):
    with running() as server:
        args = ["--url", server.url, "--concurrency", 2, "--num-requests", 6, "--input-len", 600]
        assert bench(*args, "--dataset", "agents", "--mix", "sampled", "--cold", "--json") == 0
    first, warm = json.loads(capsys.readouterr().out)["rows"]
    assert (first["load"], warm["load"]) == ("2 at a time, first run", "2 at a time")
    assert warm["workload"] == "agents, at most 600 in, sampled"
    assert len(server.bodies) == 6 + 4 + 6  # four of warm-up between them
    assert [body["temperature"] for body in server.bodies[:6]] == [0.0, 0.7, 1.0, 0.8, 1.0, 0.0]
    prompts = {tuple(body["prompt"][:512]) for body in server.bodies[:6]}
    assert len(prompts) == 1  # the same instructions


def test_a_server_that_refuses_says_why(capsys):
    with running([Reply(status=400)]) as server:
        assert bench("--url", server.url, "--rate", 5, "--num-requests", 3) == 2
    said = capsys.readouterr().err
    assert "status 400 it is" in said
    assert "--vocab" in said
    assert len(server.bodies) == 1  # asked once, not three times


def test_nobody_there(capsys):
    with running() as server:
        url = server.url
    assert bench("--url", url, "--rate", 5) == 2
    assert "is the server running?" in capsys.readouterr().err


def test_when_everything_fails_the_status_says_so():
    with running([Reply(), Reply(status=500)]) as server:
        assert bench("--url", server.url, "--rate", 100, "--num-requests", 3, "--warmup", 1) == 1


def test_a_key_is_sent_and_written_nowhere(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MY_KEY", "s3cret")
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    with running() as server:
        assert bench("--url", server.url, "--rate", 100, "--num-requests", 3, "--api-key-env", "MY_KEY",
                     "--out", out, "--html", page, "--commit", "abc", "--json") == 0  # fmt: skip
    assert all("authorization: Bearer s3cret" in head for head in server.heads)
    written = out.read_text() + page.read_text() + "".join(capsys.readouterr())
    assert "s3cret" not in written


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "neither --rate nor --concurrency"),
        (["--rate", "0"], "--rate is 0"),
        (["--rate", "nan"], "--rate is nan"),
        (["--rate", "inf"], "without --num-requests"),
        (["--concurrency", "0"], "--concurrency is 0"),
        (["--rate", "1", "--concurrency", "1", "2"], "several --concurrency"),
        (["--rate", "1", "--duration", "-1"], "--duration is -1"),
        (["--rate", "1", "--dataset", "sharegpt"], "no dataset 'sharegpt'"),
        (["--rate", "1", "--dataset", "trace"], "without a file"),
        (["--rate", "1", "--find-rate", "--cold", "--slo-ttft-ms", "9"], "--cold and --find-rate"),
        (["--rate", "1", "--dataset", "trace", "/no/such/file"], "cannot read the trace"),
        (["--rate", "1", "--merge"], "--merge is given without --out"),
        (["--rate", "1", "--extra-body", "[1]"], "--extra-body"),
        (["--rate", "1", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
        (["--rate", "1", "--endpoint", "chat", "--prompt-form", "tokens"], "takes no token ids"),
        (["--rate", "1", "--html", "/no/such/folder/x.html"], "cannot write"),
        (["--rate", "1", "--url", "localhost"], "no address"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(flags, says, capsys):
    url = [] if "--url" in flags else ["--url", "http://127.0.0.1:1"]
    assert bench(*url, *flags) == 2
    assert says in capsys.readouterr().err


def test_without_an_end_there_is_one():
    setup, loads = read_setup(BenchServe(url="http://x", rate=[1.0]))
    assert (setup.duration_s, setup.count, len(loads)) == (30.0, None, 1)
    setup, _ = read_setup(BenchServe(url="http://x", rate=[1.0], concurrency=[7], num_requests=3))
    assert (setup.duration_s, setup.count, setup.limit) == (None, 3, 7)
    with pytest.raises(UsageError):
        read_setup(BenchServe(url="http://x"))


def test_it_runs_without_torch():
    """A load test starts in a second, on a machine that has no torch."""
    code = (
        "import sys; sys.modules['torch'] = None; from cairn.cli.main import main; "
        "sys.exit(main(['bench', 'serve', '--url', sys.argv[1], '--rate', '100', '--num-requests', '3']))"
    )
    with running() as server:
        done = subprocess.run(
            [sys.executable, "-c", code, server.url],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ,
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_progress_in_words():
    half = LoadProgress("8/s poisson", 50, 7, 100, 30.0, None)
    assert line(half) == f"8/s poisson  {'━' * 12}{'╌' * 12}  50/100  7 in flight  0:30 left"
    begun = LoadProgress("8/s poisson", 0, 7, 100, 1.0, None)
    assert line(begun).endswith("0/100  7 in flight")
    timed = LoadProgress("4 at a time", 5, 4, None, 15.0, 60.0)
    assert line(timed).endswith("5  4 in flight  0:45 left")
    assert LoadProgress("", 90, 0, 100, 10.0, 100.0).share == 0.9


def percentile(values, share):
    """Linear between the two neighbours, written down anew."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def test_the_figures_follow_from_the_records(tmp_path):
    """Each request as the client wrote it down, and the row computed from that a second time."""
    out, lines = tmp_path / "serve.json", tmp_path / "records.jsonl"
    slow = Reply(delay_s=0.08, gap_s=0.004)
    with running(
        [Reply()] + [Reply(delay_s=0.005, gap_s=0.002), slow, Reply(status=503)] * 20
    ) as server:
        bench("--url", server.url, "--rate", 60, "--num-requests", 45, "--output-len", 6, "--warmup", 1,
              "--slo-ttft-ms", 70, "--slo-tpot-ms", 1000, "--out", out, "--records", lines, "--commit", "abc",
              "--input-len", 11)  # fmt: skip
    (row,) = read(out).rows
    records = [json.loads(text) for text in lines.read_text().splitlines()]
    good = [record for record in records if record["error"] is None]
    ttft = [1e3 * (record["chunk_s"][0] - record["due_s"]) for record in good]
    tpot = [1e3 * (r["chunk_s"][-1] - r["chunk_s"][0]) / (r["output_tokens"] - 1) for r in good]
    whole = max(record["end_s"] for record in records) - min(record["due_s"] for record in records)
    kept = sum(one <= 70 for one in ttft)
    assert row.completed == len(good) == 30
    assert {record["output_tokens"] for record in good} == {6}
    assert kept <= 15  # the slow ones break their promise, by what the server does
    assert row.good == kept
    for spread, values in ((row.ttft_ms, ttft), (row.tpot_ms, tpot)):
        for share in (50, 90, 99):
            assert getattr(spread, f"p{share}") == pytest.approx(percentile(values, share))
        assert spread.mean == pytest.approx(sum(values) / len(values))
    assert row.ttft_ms.p99 >= 80  # the server waits so long
    assert row.goodput_per_s == pytest.approx(kept / whole)
    assert row.output_tokens_per_s == pytest.approx(6 * 30 / whole)
    assert row.requests_per_s == pytest.approx(30 / whole)
    assert row.holds_slo is False
    assert row.workload == "random, 11 in, 6 out"


def test_a_search_tries_what_the_verdicts_ask_for(capsys):
    """The mock hangs up on what comes after 40 requests: low rates hold, and the high bound does not."""
    with running([Reply()] * 41 + [Reply(status=503)] * 10 + [Reply()] * 500) as server:
        assert bench("--url", server.url, "--find-rate", "--rate", 100, 400, "--resolution", "0.5", "--num-requests",
                     20, "--warmup", 21, "--slo-ttft-ms", 60000, "--output-len", 2, "--json") == 0  # fmt: skip
    captured = capsys.readouterr()
    rows = json.loads(captured.out)["rows"]
    assert [(row["rate"], row["holds_slo"]) for row in rows] == [
        (100.0, True),
        (400.0, False),
        (200.0, True),
        (283.0, True),
    ]
    assert "the highest rate that holds is 283/s; 400/s is broken" in captured.err


def test_a_server_of_our_own_for_the_time_of_the_test(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "serve.json"
    common = ["--num-requests", 6, "--output-len", 5, "--out", out, "--merge", "--commit", "a"]
    with running() as server:
        assert bench("--url", server.url, "--rate", 50, *common) == 0
    start = "random:tiny --device cpu --dtype float32 --num-gpu-blocks-override 128"
    assert bench("--start", start, "--rate", 50, 80, "--input-len", 16, *common) == 0
    other, *rows = read(out).rows
    assert (other.workload, other.ready_seconds, other.server) == (
        "random, 128 in, 5 out",
        None,
        "",
    )
    assert [(row.shape, row.workload, row.rate) for row in rows] == [
        ("tiny", "random, 16 in, 5 out", 50.0),
        ("tiny", "random, 16 in, 5 out", 80.0),
    ]
    assert all(row.completed == 6 and row.ready_seconds > 0 and row.server == start for row in rows)
    # A model without text streams its tokens, too (several at once, where the reader is slow).
    assert all(0 < row.itl_ms.count <= 6 * 4 for row in rows)
    assert "ready after" in capfd.readouterr().err


def test_a_warm_up_under_load_does_not_count():
    with running() as server:
        assert bench("--url", server.url, "--rate", 100, "--num-requests", 10, "--warmup", 1,
                     "--warmup-duration", "0.3", "--output-len", 2) == 0  # fmt: skip
    assert len(server.bodies) > 1 + 10
    assert len({tuple(body["prompt"]) for body in server.bodies}) == len(server.bodies)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rate", "1"], "neither --url nor --start"),
        (["--rate", "1", "--url", "http://x", "--start", "random:tiny"], "--url and --start are"),
        (["--rate", "1", "--start", " "], "--start is empty"),
        (["--rate", "1", "--start", "'random:tiny"], "No closing quotation"),
        (["--rate", "1", "--start", "random:tiny --port 80"], "--start has --port"),
        (["--find-rate", "--rate", "1", "--url", "http://x"], "without a limit"),
        (["--find-rate", "--url", "http://x", "--slo-ttft-ms", "9"], "with 0 rates"),
        (["--find-rate", "--rate", "9", "3", "--url", "http://x", "--slo-ttft-ms", "9"], "9 and 3"),
        (["--find-rate", "--rate", "1", "--url", "http://x", "--slo-ttft-ms", "9", "--resolution", "0"], "--resol"),
        (["--rate", "inf", "--num-requests", "2", "--url", "http://x", "--warmup-duration", "1"], "no meaning"),
        (["--rate", "1", "--url", "http://x", "--warmup-duration", "-1"], "--warmup-duration is -1"),
    ],
)  # fmt: skip
def test_more_bad_input(flags, says, capsys):
    assert bench(*flags) == 2
    assert says in capsys.readouterr().err
