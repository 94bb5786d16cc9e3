"""From records to rows to a page: figures that add up, HTML that is whole, one point as well as a sweep."""

import math
import random
import subprocess
from html.parser import HTMLParser

import msgspec
import pytest
from browser import chromium

from cairn.bench.load_answer import RequestRecord
from cairn.bench.load_client import Target
from cairn.bench.load_report import render
from cairn.bench.load_row import read, report, summarize
from cairn.bench.load_setup import LoadLevel, LoadSetup, describe, due_times, prompts
from cairn.bench.load_stats import LatencySlo
from cairn.bench.record import RecordOrigin, write
from cairn.core.errors import DataError

ORIGIN = RecordOrigin(
    command="cairn bench serve", commit="abc", date="2026-01-01", device="d", versions={}
)
SLO = LatencySlo(ttft_s=0.3, tpot_s=0.05)
SETUP = LoadSetup(target=Target(url="http://x", model="m<b>"), slo=SLO, count=5, label="ours")


def records(count, seed=0, failing=0.0):
    generator = random.Random(seed)
    made = []
    for number in range(count):
        due = number / 5
        first = due + generator.uniform(0.05, 0.4)
        chunks = [first + step * 0.02 for step in range(10)]
        failed = generator.random() < failing
        made.append(
            RequestRecord(
                due_s=due, sent_s=due + 0.001, end_s=chunks[-1] + 0.001,
                first_s=None if failed else first, last_s=None if failed else chunks[-1],
                chunk_s=[] if failed else chunks, output_tokens=0 if failed else 10, asked_tokens=10,
                input_tokens=None if failed else 128, finish="length",
                error="http 503" if failed else None, detail="busy & <full>" if failed else None,
            )
        )  # fmt: skip
    generator.shuffle(made)
    return made


FIVE = LoadLevel(rate=5.0)


def row(load=FIVE, count=40, setup=SETUP, **options):
    return summarize(setup, load, records(count, **options), cpu=0.1)


class Whole(HTMLParser):
    """Every element that opens closes, in order; nothing is fetched from anywhere."""

    EMPTY = ("meta", "br")

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        assert not {"src", "href", "onload"} & {name for name, _ in attrs}
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(page):
    whole = Whole()
    whole.feed(page)
    assert whole.open == []
    return whole


def test_the_figures_of_a_row_add_up():
    made = row(count=50, failing=0.3)
    assert made.requests == 50
    assert made.completed + sum(made.errors.values()) == 50
    assert made.errors.keys() == {"http 503"}
    assert made.output_tokens == 10 * made.completed
    assert made.input_tokens == 128 * made.completed
    assert made.output_tokens_per_s * made.seconds == pytest.approx(made.output_tokens)
    assert made.requests_per_s * made.seconds == pytest.approx(made.completed)
    assert 0 < made.good < made.completed
    assert made.goodput_per_s * made.seconds == pytest.approx(made.good)
    assert made.tpot_ms.p50 == pytest.approx(20)
    assert made.itl_ms.count == 9 * made.completed
    assert made.client_late_p99_ms == pytest.approx(1)
    assert made.steady.seconds < made.seconds


@pytest.mark.parametrize(
    ("slo", "failing", "holds"),
    [
        (LatencySlo(), 0.0, None),
        (LatencySlo(ttft_s=0.5, tpot_s=0.05), 0.0, True),
        (LatencySlo(ttft_s=0.5, tpot_s=0.05), 0.5, False),
        (LatencySlo(ttft_s=0.2), 0.0, False),
        (LatencySlo(tpot_s=0.01), 0.0, False),
        (LatencySlo(e2e_s=0.1), 0.0, False),
    ],
)
def test_a_promise_is_held_or_broken(slo, failing, holds):
    setup = msgspec.structs.replace(SETUP, slo=slo)
    assert row(setup=setup, failing=failing).holds_slo is holds


def test_a_run_of_failures_is_a_row_too():
    made = row(failing=1.0)
    assert (made.completed, made.ttft_ms, made.goodput_per_s, made.holds_slo) == (
        0,
        None,
        0.0,
        False,
    )
    page = render(report(ORIGIN, [made]), {0: records(40, failing=1.0)})
    assert "busy & <full>" in " ".join(parsed(page).text)


def test_a_row_survives_its_file_and_merges_by_its_key(tmp_path):
    path = tmp_path / "serve.json"
    write(report(ORIGIN, [row(), row(LoadLevel(rate=9.0))]), path)
    old = read(path)
    assert [(one.commit, one.load) for one in old.rows] == [
        ("abc", "5/s poisson"),
        ("abc", "9/s poisson"),
    ]
    newer = msgspec.structs.replace(ORIGIN, commit="def", command="cairn bench serve --again")
    both = report(newer, [row(LoadLevel(rate=5.0))], old)
    assert [(one.commit, one.load) for one in both.rows] == [
        ("abc", "9/s poisson"),
        ("def", "5/s poisson"),
    ]
    assert both.command == "cairn bench serve; cairn bench serve --again"
    path.write_text("{}")
    with pytest.raises(DataError, match="cannot read"):
        read(path)


@pytest.mark.parametrize(
    "loads",
    [
        [LoadLevel(rate=5.0)],
        [LoadLevel(rate=2.0), LoadLevel(rate=5.0), LoadLevel(rate=math.inf)],
        [LoadLevel(concurrency=2), LoadLevel(concurrency=8)],
        [LoadLevel(rate=5.0)] * 2,
    ],
)
def test_the_page_is_whole_with_one_point_as_with_many(loads):
    rows = [row(load, seed=place, count=30) for place, load in enumerate(loads)]
    page = render(report(ORIGIN, rows), {place: records(30, place) for place in range(len(rows))})
    seen = parsed(page)
    sweep = 5 if len({describe(load, SETUP) for load in loads}) > 1 else 0
    assert seen.seen.count("svg") == sweep + 6 * len(rows)
    text = " ".join(seen.text)
    assert "m<b>" in text  # escaped on the way
    assert "time to first token" in text
    assert "cairn bench serve" in text
    assert len(page) < 300_000


def test_the_page_of_a_long_run_stays_small():
    many = records(5000)
    page = render(report(ORIGIN, [summarize(SETUP, LoadLevel(rate=5.0), many, 0.1)]), {0: many})
    assert len(page) < 300_000


def test_a_page_without_records_has_the_table_and_the_curves():
    seen = parsed(render(report(ORIGIN, [row(), row(LoadLevel(rate=9.0))]), {}))
    assert seen.seen.count("svg") == 5


def test_a_browser_draws_it(tmp_path):
    path = tmp_path / "out.html"
    path.write_text(render(report(ORIGIN, [row()]), {0: records(40)}), encoding="utf-8")
    shot = tmp_path / "shot.png"
    command = [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        f"--screenshot={shot}", "--window-size=1200,1600", path.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=90)
    assert shot.read_bytes()[:4] == b"\x89PNG"


def test_loads_in_words():
    assert describe(LoadLevel(rate=2.5), SETUP) == "2.5/s poisson"
    assert describe(LoadLevel(concurrency=8), SETUP) == "8 at a time"
    bursty = msgspec.structs.replace(SETUP, arrivals="gamma", burstiness=0.25, limit=4)
    assert describe(LoadLevel(rate=3), bursty) == "3/s gamma 0.25, 4 at most"
    assert describe(LoadLevel(rate=math.inf), bursty) == "all at once, 4 at most"
    traced = msgspec.structs.replace(SETUP, dataset="trace")
    assert describe(LoadLevel(), traced) == "as traced"
    assert describe(LoadLevel(rate=3), traced) == "3/s as traced"


def test_points_of_a_sweep_share_their_times_but_not_their_prompts():
    assert due_times(SETUP, LoadLevel(rate=4.0)) == due_times(SETUP, LoadLevel(rate=4.0))
    assert len(due_times(SETUP, LoadLevel(rate=4.0))) == 5
    assert due_times(SETUP, LoadLevel(concurrency=4)) is None
    assert next(prompts(SETUP, 0)) == next(prompts(SETUP, 0))
    assert next(prompts(SETUP, 0)) != next(prompts(SETUP, 1))
