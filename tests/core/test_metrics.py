"""What is counted is what Prometheus reads."""

import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from cairn.core.metrics import (
    CATALOGUE,
    CounterMetric,
    Gauge,
    Histogram,
    Metrics,
)

REQUESTS = CounterMetric(
    name="cairn_seen_requests_total", help="Seen.", unit="requests", labels=("model", "code")
)
USED = Gauge(name="cairn_used_bytes", help="Used.", unit="bytes")
WAIT = Histogram(
    name="cairn_wait_seconds",
    help='Waiting, with a \\ and a "quote"\nand a second line.',
    unit="seconds",
    labels=("model",),
    buckets=(0.1, 1, 10),
)
SMALL = (REQUESTS, USED, WAIT)


def parsed(text: str) -> dict[tuple[str, tuple], float]:
    """Every sample that Prometheus' own parser finds in the text."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_text_is_the_one_that_prometheus_documents():
    metrics = Metrics(SMALL)
    metrics.add("cairn_seen_requests_total", model="a", code="200")
    metrics.add("cairn_seen_requests_total", 2, model="a", code="200")
    metrics.set("cairn_used_bytes", 7.5)
    metrics.add("cairn_used_bytes", -0.5)
    for value in (0.05, 0.1, 0.5, 100):
        metrics.observe("cairn_wait_seconds", value, model="a")
    assert metrics.render() == (
        "# HELP cairn_seen_requests_total Seen.\n"
        "# TYPE cairn_seen_requests_total counter\n"
        'cairn_seen_requests_total{code="200",model="a"} 3.0\n'
        "# HELP cairn_used_bytes Used.\n"
        "# TYPE cairn_used_bytes gauge\n"
        "cairn_used_bytes 7.0\n"
        '# HELP cairn_wait_seconds Waiting, with a \\\\ and a "quote"\\nand a second line.\n'
        "# TYPE cairn_wait_seconds histogram\n"
        'cairn_wait_seconds_bucket{le="0.1",model="a"} 2.0\n'
        'cairn_wait_seconds_bucket{le="1.0",model="a"} 3.0\n'
        'cairn_wait_seconds_bucket{le="10.0",model="a"} 3.0\n'
        'cairn_wait_seconds_bucket{le="+Inf",model="a"} 4.0\n'
        'cairn_wait_seconds_count{model="a"} 4.0\n'
        'cairn_wait_seconds_sum{model="a"} 100.65\n'
    )


@given(
    st.dictionaries(st.tuples(st.text(), st.text()), st.integers(0, 10**6), max_size=4),
    st.floats(),
    st.lists(st.floats(allow_nan=False), max_size=10),
)
def test_the_parser_of_prometheus_reads_every_value_back(requests, used, waits):
    metrics = Metrics(SMALL)
    for (model, code), count in requests.items():
        metrics.add("cairn_seen_requests_total", count, model=model, code=code)
    metrics.set("cairn_used_bytes", used)
    for wait in waits:
        metrics.observe("cairn_wait_seconds", wait, model="m")
    found = parsed(metrics.render())

    for (model, code), count in requests.items():
        assert found["cairn_seen_requests_total", (("code", code), ("model", model))] == count
    assert found["cairn_used_bytes", ()] == pytest.approx(used, rel=0, nan_ok=True)
    for bound, text in ((0.1, "0.1"), (1, "1.0"), (10, "10.0"), (math.inf, "+Inf")):
        if waits:
            below = found["cairn_wait_seconds_bucket", (("le", text), ("model", "m"))]
            assert below == sum(wait <= bound for wait in waits)


def test_a_label_that_is_not_unicode_can_still_be_sent():
    metrics = Metrics(SMALL)
    metrics.observe("cairn_wait_seconds", 1, model="file \udcff")
    assert b'model="file ?"' in metrics.render().encode()


def test_help_and_type_reach_the_parser():
    metrics = Metrics(SMALL)
    metrics.observe("cairn_wait_seconds", 1, model="m")
    families = {family.name: family for family in text_string_to_metric_families(metrics.render())}
    assert families["cairn_wait_seconds"].type == "histogram"
    assert families["cairn_wait_seconds"].documentation == WAIT.help
    assert families["cairn_used_bytes"].type == "gauge"


def test_threads_lose_no_count():
    metrics = Metrics(SMALL)

    def work() -> None:
        for _ in range(2000):
            metrics.add("cairn_seen_requests_total", model="a", code="200")
            metrics.observe("cairn_wait_seconds", 0.5, model="a")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = parsed(metrics.render())
    assert found["cairn_seen_requests_total", (("code", "200"), ("model", "a"))] == 8000
    assert found["cairn_wait_seconds_count", (("model", "a"),)] == 8000


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda m: m.add("cairn_seen_request_total"), "did you mean 'cairn_seen_requests_total'?"),
        (lambda m: m.add("zebra"), "unknown metric 'zebra': it is not in the catalogue"),
        (lambda m: m.observe("cairn_wait_seconds", 1, modle="a"), "did you mean 'model'?"),
        (
            lambda m: m.set("cairn_used_bytes", 1, model="a"),
            "no label 'model': labels: it has none",
        ),
        (lambda m: m.observe("cairn_wait_seconds", 1), "needs the label 'model'"),
        (
            lambda m: m.observe("cairn_used_bytes", 1),
            "cannot observe cairn_used_bytes, it is a gauge",
        ),
        (
            lambda m: m.set("cairn_wait_seconds", 1),
            "cannot set cairn_wait_seconds, it is a histogram",
        ),
        (
            lambda m: m.add("cairn_wait_seconds", model="a"),
            "cannot add to cairn_wait_seconds, it is a",
        ),
        (
            lambda m: m.add("cairn_seen_requests_total", -1, model="a", code="b"),
            "only grows, got -1",
        ),
        (lambda m: m.add("cairn_seen_requests_total", math.nan, model="a", code="b"), "got nan"),
        (
            lambda m: m.observe("cairn_wait_seconds", math.nan, model="a"),
            "nan falls into no bucket",
        ),
    ],
)
def test_a_mistake_in_the_program_is_named(wrong, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the message is compared below
        wrong(Metrics(SMALL))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: CounterMetric(name="cairn_x_tokens", help="", unit="tokens"), "_total"),
        (lambda: Gauge(name="cairn_x_bytes_total", help="", unit="bytes"), "_total"),
        (lambda: Gauge(name="cairn_x_bytes", help="", unit="seconds"), "does not end in its unit"),
        (lambda: Gauge(name="cairn-x_bytes", help="", unit="bytes"), "is not a name"),
        (
            lambda: Gauge(name="x_bytes", help="", unit="bytes", labels=("le",)),
            "belongs to the buck",
        ),
        (lambda: Histogram(name="x_s", help="", unit="s", buckets=(2, 1)), "finite and grow"),
        (
            lambda: Histogram(name="x_s", help="", unit="s", buckets=(1, math.inf)),
            "finite and grow",
        ),
        (lambda: Metrics([USED, USED]), "the same name"),
    ],
)
def test_a_wrong_declaration_is_refused(declare, message):
    with pytest.raises(ValueError, match=message):
        declare()


def test_the_catalogue_is_small_complete_and_readable():
    metrics = Metrics()
    for metric in CATALOGUE:
        assert metric.name.startswith("cairn_")
        assert metric.help.endswith(".")
        labels = dict.fromkeys(metric.labels, "x")
        (metrics.observe if isinstance(metric, Histogram) else metrics.add)(
            metric.name, 1, **labels
        )
    families = {family.name for family in text_string_to_metric_families(metrics.render())}
    assert families == {metric.name.removesuffix("_total") for metric in CATALOGUE}
