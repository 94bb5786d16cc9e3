"""A Grafana dashboard made from the catalogue of metrics, so that no panel asks for what is not counted.

    Histogram   p50, p90 and p99 over time       Counter   per second       Gauge   as it is

The type of a metric decides how it is drawn; only the order and the grouping are chosen (`PanelRow`). Metrics that no
row names are in the last one, so a new metric is on the dashboard at once. Pure: a document out, no Grafana needed.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from cairn.core.metrics import CounterMetric, Gauge, Histogram, MetricSpec

SCHEMA = 39  # of Grafana 11; newer ones read it
QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
WIDTH, HEIGHT, ACROSS = 8, 8, 24  # of a panel, and of the page
UNITS = {"seconds": "s", "bytes": "bytes"}  # Grafana's names; everything else is a count
SOURCE = {"type": "prometheus", "uid": "${source}"}


class PanelRow(msgspec.Struct, frozen=True):
    title: str
    metrics: tuple[str, ...]


def dashboard(
    catalogue: Sequence[MetricSpec], rows: Sequence[PanelRow], title: str, uid: str
) -> dict[str, Any]:
    """The document that Grafana imports; it asks for a data source, and for the models to show."""
    metrics = {metric.name: metric for metric in catalogue}
    named = {name for row in rows for name in row.metrics}
    unknown = sorted(named - metrics.keys())
    if unknown:
        raise ValueError(f"the dashboard names metrics that are not counted: {', '.join(unknown)}")
    rest = tuple(name for name in metrics if name not in named)
    chosen = [*rows, PanelRow("Everything else", rest)] if rest else [*rows]
    return {
        "uid": uid,
        "title": title,
        "tags": ["cairn"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_source(), _models()]},
        "panels": list(_panels(chosen, metrics)),
    }


def queries(metric: MetricSpec) -> list[tuple[str, str]]:
    """PromQL, and what its lines are called."""
    others = [label for label in metric.labels if label != "model"]
    match = '{model=~"$model"}' if "model" in metric.labels else ""
    by = ", ".join(others)
    grouped = f"sum by ({by}) " if by else "sum "
    legend = " ".join(f"{{{{{label}}}}}" for label in others)
    if isinstance(metric, Histogram):
        rate = f"rate({metric.name}_bucket{match}[$__rate_interval])"
        inside = ", ".join(["le", *others])
        return [
            (f"histogram_quantile({share}, sum by ({inside}) ({rate}))", f"{name} {legend}".strip())
            for name, share in QUANTILES
        ]
    if isinstance(metric, CounterMetric):
        return [
            (f"{grouped}(rate({metric.name}{match}[$__rate_interval]))", legend or "per second")
        ]
    across = metric.across if isinstance(metric, Gauge) else "sum"
    return [
        (f"{across}{f' by ({by})' if by else ''} ({metric.name}{match})", legend or metric.unit)
    ]


def _panels(rows: Sequence[PanelRow], metrics: dict[str, MetricSpec]) -> Iterable[dict[str, Any]]:
    number, top = 0, 0
    for row in rows:
        number += 1
        place = {"x": 0, "y": top, "w": ACROSS, "h": 1}
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "gridPos": place,
            "collapsed": False,
            "panels": [],
        }
        top += 1
        each = ACROSS // WIDTH
        for at, name in enumerate(row.metrics):
            number += 1
            place = {
                "x": at % each * WIDTH,
                "y": top + at // each * HEIGHT,
                "w": WIDTH,
                "h": HEIGHT,
            }
            yield _panel(metrics[name], number, place)
        top += -(-len(row.metrics) // each) * HEIGHT


def _panel(metric: MetricSpec, number: int, place: dict[str, int]) -> dict[str, Any]:
    unit = UNITS.get(metric.unit, "short")
    if isinstance(metric, CounterMetric):
        unit = {"s": "percentunit", "bytes": "Bps"}.get(
            unit, "ops"
        )  # seconds per second are a share
    targets = [
        {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": query, "legendFormat": legend}
        for at, (query, legend) in enumerate(queries(metric))
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": _title(metric),
        "description": metric.help,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi"},
        },
        "targets": targets,
    }


def _title(metric: MetricSpec) -> str:
    words = metric.name.removeprefix("cairn_").removesuffix("_total").replace("_", " ")
    return words[0].upper() + words[1:]


def _source() -> dict[str, Any]:
    return {
        "name": "source",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }


def _models() -> dict[str, Any]:
    query = "label_values(cairn_engine_steps, model)"
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "models"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }
