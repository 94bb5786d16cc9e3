"""Recovery actions in order of cost: the cheapest that can work, then the next one if it failed.

    tell       a rank is slow: named, nothing else
    redo       all processes start again where they were; no node is bad
    heal       a lost process starts again in its place, its state from a neighbour's memory
    spare      a node is gone: another one that waits takes its place
    shrink     no spare: fewer replicas, the same batch
    template   fewer replicas do not fit: another grid of pipelines for the ranks that are left
    requeue    too few are left here: back to the scheduler, without the bad node
    stop       it would only fail again: a mistake in the program, or too many failures

A pure function of the incident and of what is left; which causes are tried again, and how often, is the table that
launched jobs use, too (`core/restart_policy`). Nothing is started here.
"""

from typing import Literal

import msgspec

from cairn.core.exit_cause import Cause
from cairn.core.restart_policy import POLICIES
from cairn.train.parallel.layout import Layout
from cairn.train.recovery.settings import Recovery
from cairn.train.recovery.templates import Fits, best_for, shrunk

Rung = Literal["tell", "redo", "heal", "spare", "shrink", "template", "requeue", "stop"]


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    cause: Cause
    why: str = ""
    rank: int | None = None  # to blame, where that is known
    node: int | None = None
    node_lost: bool = False
    same_step: int = 0  # how often in a row it failed at this very step, with this cause


class Survivors(msgspec.Struct, frozen=True, kw_only=True):
    """Remaining nodes and layout."""

    layout: Layout  # that the job was asked to run in
    nodes: tuple[int, ...]  # that are in use now
    spares: tuple[int, ...]
    ranks_per_node: int
    strikes: dict[int, int]  # node -> failures laid to it, this one included
    failures: int  # so far, this one included


class Response(msgspec.Struct, frozen=True, kw_only=True):
    rung: Rung
    why: str
    layout: Layout | None = None  # None: as before
    nodes: tuple[int, ...] = ()
    cordon: tuple[int, ...] = ()  # nodes that are not used again until they were looked at


def respond(incident: Incident, left: Survivors, settings: Recovery, fits: Fits) -> Response:
    if incident.cause == "straggler":
        return _slow(incident, left, settings, fits)
    reason = hopeless(incident, left, settings)
    if reason is not None:
        return Response(rung="stop", why=reason)
    bad = condemned(incident, left, settings)
    if bad is None:
        return _in_place(incident, left)
    return _without(bad, incident, left, fits)


def _slow(incident: Incident, left: Survivors, settings: Recovery, fits: Fits) -> Response:
    """A node is worth more than none: it is taken out only where that was asked for, and others can go on."""
    if settings.slow_action == "tell" or incident.node is None:
        why = f"named only (recovery.slow_action): {incident.why}"
        return Response(rung="tell", why=why, nodes=left.nodes)
    response = _without(incident.node, incident, left, fits)
    if left.failures > settings.restarts or response.rung == "requeue":
        why = f"nothing can take its place: {incident.why}"
        return Response(rung="tell", why=why, nodes=left.nodes)
    return response


def hopeless(incident: Incident, left: Survivors, settings: Recovery) -> str | None:
    """Why no rung can help; None: one may."""
    policy = POLICIES[incident.cause]
    if policy.again == "never":
        return f"a mistake in the program would only fail again: {incident.why}"
    if policy.most is not None and incident.same_step >= policy.most:
        times = incident.same_step + 1
        return f"{times} times at the same step, {policy.most} are tried again: {incident.why}"
    if left.failures > settings.restarts:
        return f"{left.failures} failures, {settings.restarts} are allowed (recovery.restarts)"
    return None


def condemned(incident: Incident, left: Survivors, settings: Recovery) -> int | None:
    """The node that is not used again, if the fault is its own."""
    if incident.node is None:
        return None
    if incident.node_lost:
        return incident.node
    policy = POLICIES[incident.cause]
    if policy.strike and left.strikes.get(incident.node, 0) >= settings.same_place:
        return incident.node
    return incident.node if policy.cordon else None


def _in_place(incident: Incident, left: Survivors) -> Response:
    """No node is bad: the same places."""
    if incident.cause in ("network", "corruption") or incident.rank is None:
        return Response(rung="redo", why="nothing is lost but the last steps", nodes=left.nodes)
    return Response(
        rung="heal",
        nodes=left.nodes,
        why=f"rank {incident.rank} starts again, with the state that memory holds of it",
    )


def _without(bad: int, incident: Incident, left: Survivors, fits: Fits) -> Response:
    cordon = () if incident.cause == "preemption" else (bad,)
    if left.spares:
        nodes = tuple(left.spares[0] if node == bad else node for node in left.nodes)
        return Response(
            rung="spare",
            why=f"node {left.spares[0]} takes the place of node {bad}",
            nodes=nodes,
            cordon=cordon,
        )
    nodes = tuple(node for node in left.nodes if node != bad)
    ranks = len(nodes) * left.ranks_per_node
    smaller = shrunk(left.layout, ranks, fits)
    best = best_for(left.layout, ranks, fits) if ranks else None
    if smaller is not None and best is not None and smaller.world() >= best.world():
        return _resized("shrink", smaller, nodes, cordon, bad)
    if best is not None:
        return _resized("template", best, nodes, cordon, bad)
    if smaller is not None:
        return _resized("shrink", smaller, nodes, cordon, bad)
    return Response(
        rung="requeue",
        why=f"{ranks} ranks are left without node {bad}, and no layout fits them",
        cordon=cordon,
    )


def _resized(
    rung: Rung, layout: Layout, nodes: tuple[int, ...], cordon: tuple[int, ...], bad: int
) -> Response:
    why = f"{layout.words()} without node {bad}"
    return Response(rung=rung, why=why, layout=layout, nodes=nodes, cordon=cordon)


def grown(left: Survivors, back: tuple[int, ...], fits: Fits) -> Response | None:
    """More nodes than before: the largest layout they carry; None if that would change nothing."""
    nodes = (*left.nodes, *back)
    best = best_for(left.layout, len(nodes) * left.ranks_per_node, fits)
    if best is None or not back:
        return None
    return Response(
        rung="spare",
        why=f"node {', '.join(map(str, back))} is back: {best.words()}",
        layout=best,
        nodes=nodes,
    )
