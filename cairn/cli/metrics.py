"""`cairn metrics`: what the server counts, and a Grafana dashboard of it. Starts nothing."""

from pathlib import Path

import msgspec

from cairn.cli.subverbs import Subverb, dispatch
from cairn.core.config import load
from cairn.core.errors import UsageError
from cairn.core.prose import in_terminal

ABOUT = "What `cairn serve` counts at /metrics, and how to look at it."


class Grafana(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Print a Grafana dashboard of everything that the server counts.

    Import it in Grafana (Dashboards, New, Import) and choose the Prometheus that reads /metrics.
    """

    out: Path | None = None
    """write it to this file instead"""


class Listed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """List every metric of the server: its kind, its labels, and what it means."""

    json: bool = False
    """print the list as JSON"""


def run(args: list[str]) -> int:
    parts = {
        "list": Subverb(_list, "every metric, its labels and what it means"),
        "grafana": Subverb(_grafana, "a Grafana dashboard of them, as JSON"),
    }
    return dispatch("metrics", ABOUT, parts, args)


def _grafana(args: list[str]) -> int:
    options = load(Grafana, args=args, env_prefix="CAIRN_METRICS_").value
    from cairn.serve.http.server.dashboard import dashboard_text

    text = dashboard_text()
    if options.out is None:
        print(text, end="")
        return 0
    try:
        options.out.write_text(text)
    except OSError as error:
        raise UsageError(
            f"cannot write {options.out}: {error.strerror}", hint="choose another --out"
        ) from None
    print(f"wrote {options.out}; import it in Grafana: Dashboards, New, Import")
    return 0


def _list(args: list[str]) -> int:
    options = load(Listed, args=args, env_prefix="CAIRN_METRICS_").value
    from cairn.serve.http.server.metric_catalogue import CATALOGUE_HTTP

    if options.json:
        rows = [
            {
                "name": metric.name,
                "kind": type(metric).__name__.lower(),
                "labels": metric.labels,
                "help": metric.help,
            }
            for metric in CATALOGUE_HTTP
        ]
        print(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
        return 0
    for metric in CATALOGUE_HTTP:
        labels = f" by {', '.join(metric.labels)}" if metric.labels else ""
        print(f"{metric.name}   {type(metric).__name__.lower()}{labels}")
        print(in_terminal(f"    {metric.help}", "    "))
    return 0
