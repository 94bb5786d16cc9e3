"""The Grafana dashboard: made from the catalogue, checked in as made, and asking only for what is counted."""

import json
import re
from pathlib import Path

import pytest

from cairn.cli.main import main
from cairn.core.grafana import PanelRow, dashboard, queries
from cairn.core.metrics import CounterMetric, Gauge, Histogram
from cairn.serve.http.server.dashboard import ROWS, dashboard_text, server_dashboard
from cairn.serve.http.server.metric_catalogue import CATALOGUE_HTTP

FILE = Path(__file__).parents[3] / "deploy" / "grafana" / "cairn.json"
KNOWN = {metric.name: metric for metric in CATALOGUE_HTTP}
PANELS = [panel for panel in server_dashboard()["panels"] if panel["type"] != "row"]


def test_the_checked_in_file_is_the_generated_one():
    assert FILE.read_text() == dashboard_text(), (
        "run: cairn metrics grafana --out deploy/grafana/cairn.json"
    )


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_every_query_asks_for_what_is_counted(panel):
    for target in panel["targets"]:
        query = target["expr"]
        assert query.count("(") == query.count(")")
        (name,) = set(re.findall(r"cairn_\w+", query))
        histogram = name.removesuffix("_bucket")
        metric = KNOWN[histogram if isinstance(KNOWN.get(histogram), Histogram) else name]
        assert isinstance(metric, Histogram) == name.endswith("_bucket")
        assert isinstance(metric, CounterMetric | Histogram) == ("rate(" in query)
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert set(group.split(", ")) <= {*metric.labels, "le"}
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            assert label in metric.labels


def test_every_metric_has_one_panel_and_every_panel_its_place():
    drawn = [
        re.search(r"cairn_\w+", panel["targets"][0]["expr"])[0].removesuffix("_bucket")
        for panel in PANELS
    ]
    assert sorted(drawn) == sorted(KNOWN)
    numbers = [panel["id"] for panel in server_dashboard()["panels"]]
    assert len(set(numbers)) == len(numbers)
    taken = set()
    for panel in server_dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_a_variable_of_a_query_is_declared():
    declared = {variable["name"] for variable in server_dashboard()["templating"]["list"]}
    text = json.dumps(server_dashboard())
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__all"}
    assert used == declared == {"source", "model"}


def test_rows_name_what_exists():
    assert {name for row in ROWS for name in row.metrics} <= KNOWN.keys()
    with pytest.raises(ValueError, match="cairn_nothing_total"):
        dashboard(CATALOGUE_HTTP, [PanelRow("x", ("cairn_nothing_total",))], "t", "u")


def test_what_no_row_names_is_in_the_last_one():
    extra = Gauge(name="cairn_odd_things", help="h", unit="things", across="max")
    made = dashboard([*CATALOGUE_HTTP, extra], ROWS, "t", "u")
    assert made["panels"][-1]["title"] == "Odd things"
    assert made["panels"][-1]["targets"][0]["expr"] == "max (cairn_odd_things)"


def test_a_query_for_each_kind():
    assert queries(KNOWN["cairn_finished_requests_total"]) == [
        (
            'sum by (reason) (rate(cairn_finished_requests_total{model=~"$model"}[$__rate_interval]))',
            "{{reason}}",
        )
    ]
    found = queries(KNOWN["cairn_request_phase_seconds"])
    assert [legend for _, legend in found] == ["p50 {{phase}}", "p90 {{phase}}", "p99 {{phase}}"]
    assert "histogram_quantile(0.99, sum by (le, phase)" in found[2][0]


def test_the_verb(capsys, tmp_path):
    assert main(["metrics", "grafana"]) == 0
    assert capsys.readouterr().out == dashboard_text()
    out = tmp_path / "made.json"
    assert main(["metrics", "grafana", "--out", str(out)]) == 0
    assert out.read_text() == dashboard_text()
    assert main(["metrics", "grafana", "--out", str(tmp_path / "no" / "x.json")]) == 2
    capsys.readouterr()
    assert main(["metrics", "list", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == [*KNOWN]
    assert main(["metrics"]) == 2
