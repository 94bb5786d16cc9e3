"""`cairn simulate`: what would happen, without the machines. One kind of simulation a file; prints, decides nothing."""

from cairn.cli.cluster import (
    simulate_cluster,
    simulate_failures,
    simulate_fleet,
    simulate_separation,
)
from cairn.cli.subverbs import Subverb, dispatch

ABOUT = "Simulate: a cluster under a policy, the failures of many GPUs, a fleet of servers."


def run(args: list[str]) -> int:
    return dispatch("simulate", ABOUT, SUBVERBS, args)


SUBVERBS: dict[str, Subverb] = {
    "cluster": Subverb(simulate_cluster.run, "replay a trace of jobs through scheduling policies"),
    "fleet": Subverb(simulate_fleet.run, "replay a trace of requests through routing policies"),
    "separation": Subverb(
        simulate_separation.run, "prefill and decode on servers of their own, where it pays"
    ),
    "failures": Subverb(simulate_failures.run, "goodput of 1k..131k GPUs by checkpoint scheme"),
}
