"""The leader's view of a launched job: all nodes' reports in, findings and orders out. One for each life of the ranks.

    NodeReport of each node --take--> who is where --judge--> WatchFinding, for the ledger; Order, for the rank's node
                                        detect.judge, Slowness: hang, straggler      ladder.respond: what is done

The same rules as under the driver of one machine. Whether a rank is stopped is the business of its own node
(`node_watch`), as is ending it. No sockets, no files; the clock is given.
"""

from collections.abc import Sequence

import msgspec

from cairn.core.end_reason import EndReason
from cairn.core.exit_cause import Cause
from cairn.train.parallel.layout import Layout
from cairn.train.recovery.failure_detection import (
    Finding,
    Progress,
    RankView,
    Slowness,
    StepWork,
    judge,
    moved,
    verdict_of,
)
from cairn.train.recovery.findings import WatchFinding
from cairn.train.recovery.ladder import Incident, Response, Survivors, respond
from cairn.train.recovery.node_report import Duty, NodeReport, Order, RankReport
from cairn.train.recovery.stall_note import where

AGAIN_S = 10.0  # an order that was not followed by then will not be
FRESH_S = 3.0  # what a node said before that says nothing about now: it may be gone
LEAVE = ("spare", "shrink", "template", "requeue")  # rungs that do without the node
NEVER = 1 << 30


class Decision(msgspec.Struct, frozen=True):
    found: WatchFinding
    order: Order | None = None  # None: it is only reported
    node: str = ""  # whose rank the order is about


class Leader:
    def __init__(self, duty: Duty, findings: Sequence[WatchFinding], now: float) -> None:
        """`known`: what was found in earlier lives of this run."""
        self.duty, self.known, self.started = duty, list(findings), now
        self.progress = Progress(at=now)
        self.slowness = Slowness(duty.settings.slow_factor)
        self.reports: dict[str, NodeReport] = {}
        self.received_at: dict[str, float] = {}  # when
        self.ranks: dict[int, tuple[RankReport, NodeReport]] = {}
        self.spent: dict[int, list[StepWork]] = {}
        self.ordered_at: float | None = None
        self.replacing = False  # a slow node is on its way out

    def take(self, report: NodeReport, now: float) -> None:
        if report.life != self.duty.life:
            return
        place = f"{report.host}/{report.node}"
        self.reports[place], self.received_at[place] = report, now
        for one in report.ranks:
            self.spent.setdefault(one.rank, []).extend(StepWork(*spent) for spent in one.spent)

    def judge(self, now: float, wall: float) -> list[Decision]:
        """`now`: of this machine's steady clock; `wall`: the same moment, for the ledger."""
        self.ranks = {one.rank: (one, node) for node in self.reports.values() for one in node.ranks}
        if sorted(self.ranks) != list(range(self.duty.world)):
            return []  # they start, or they end
        ranks = self._seen(now)
        self.progress = moved(self.progress, ranks, now)
        decisions = self._stragglers(ranks, wall)
        quiet = {place: at for place, at in self.received_at.items() if now - at > FRESH_S}
        if quiet:
            return decisions + self._unreachable(min(quiet, key=quiet.__getitem__), now, wall)
        finding = judge(ranks, self.progress, self.started, now, self.duty.settings)
        if finding is not None:
            decisions += self._stuck(finding, now, wall)
        return decisions

    def _seen(self, now: float) -> list[RankView]:
        spent, self.spent = self.spent, {}
        return [
            RankView(
                rank=rank,
                alive=True,
                phase=one.phase,
                beat=now,
                step=one.step,
                collectives=one.collectives,
                waits=one.waits,
                recent=tuple(spent.get(rank, ())),
            )
            for rank, (one, _) in sorted(self.ranks.items())
        ]

    # -- slow ------------------------------------------------------------------------------------------

    def _stragglers(self, ranks: list[RankView], wall: float) -> list[Decision]:
        stragglers = self.slowness.look(ranks)
        decisions = [self._slow(rank, wall) for rank in stragglers]
        for rank in self.slowness.over:  # maybe named just now: several steps are looked at at once
            why = "it keeps up with the others again"
            over = self._found("straggler over", "straggler", rank, wall, wall, why, "tell")
            decisions.append(Decision(over))
        return decisions

    def _slow(self, rank: int, wall: float) -> Decision:
        why = self.slowness.evidence[rank].words()
        response = self._respond("straggler", rank, why)
        order = None
        if response.rung != "tell" and self.ordered_at is None and not self.replacing:
            order = self._order(rank, "straggler", why, response.rung)
            self.replacing = True
        rung = response.rung if order is not None else "tell"
        finding = self._found("straggler", "straggler", rank, wall, wall, why, rung)
        return Decision(finding, order, finding.node)

    # -- stuck -----------------------------------------------------------------------------------------

    def _stuck(self, finding: Finding, now: float, wall: float) -> list[Decision]:
        if self.ordered_at is not None and now - self.ordered_at < AGAIN_S:
            return []
        rank, verdict = finding.rank, verdict_of(finding)
        collectives = {number: one.collective for number, (one, _) in sorted(self.ranks.items())}
        why = f"{verdict.why}{where(collectives, rank)}"
        since = wall - (now - finding.since)
        if self.ordered_at is not None:  # the order reached no node: what can be ended is here
            why = f"{why}; its node does not follow orders"
            return [self._begin_again(verdict.cause, rank, now, wall, since, why)]
        self.ordered_at = now
        response = self._respond(verdict.cause, rank, why)
        record = self._found(finding.kind, verdict.cause, rank, wall, since, why, response.rung)
        return [Decision(record, self._order(rank, verdict.cause, why, response.rung), record.node)]

    def _unreachable(self, place: str, now: float, wall: float) -> list[Decision]:
        """A node that is gone is its launcher's business; one that only cannot be reached holds all others up."""
        silent_s, stuck_s = now - self.received_at[place], self.duty.settings.stuck_s
        if min(silent_s, now - self.progress.at) <= stuck_s or self.ordered_at is not None:
            return []
        still_s = now - self.progress.at
        why = f"nothing moved for {still_s:.1f} s, and node {place} did not report for {silent_s:.1f} s"
        rank = min(one.rank for one in self.reports[place].ranks)
        return [self._begin_again("network", rank, now, wall, wall - still_s, why)]

    def _begin_again(
        self, cause: Cause, rank: int, now: float, wall: float, since: float, why: str
    ) -> Decision:
        """`rank` is to blame and cannot be reached: one of the leader's own is ended, and all meet again."""
        self.ordered_at = now
        own = self.reports[f"{self.duty.host}/{self.duty.node}"].ranks[0].rank
        finding = self._found("stuck", cause, rank, wall, since, why, "redo")
        return Decision(finding, self._order(own, cause, why, "redo"), self.duty.node)

    # -- what is done ----------------------------------------------------------------------------------

    def _respond(self, cause: Cause, rank: int, why: str) -> Response:
        report = self.ranks[rank][1]
        return answer(
            self.duty,
            self.known,
            cause,
            rank,
            why,
            place=f"{report.host}/{report.node}",
            nodes=len(self.reports),
        )

    def _order(self, rank: int, cause: Cause, why: str, rung: str) -> Order:
        one = self.ranks[rank][0]
        reason = EndReason(cause=cause, why=why, step=one.step, collective=one.collective or "none")
        leave = rung in LEAVE and self.duty.replaced
        return Order(life=self.duty.life, rank=rank, reason=reason, leave=leave)

    def _found(
        self, what: str, cause: Cause, rank: int, wall: float, since: float, why: str, rung: str
    ) -> WatchFinding:
        one, report = self.ranks[rank]
        return WatchFinding(
            at=wall,
            since=since,
            what=what,
            cause=cause,
            rank=rank,
            node=report.node,
            host=report.host,
            step=one.step,
            why=why,
            rung=rung,
            collective=one.collective or "none",
        )


def answer(
    duty: Duty,
    findings: Sequence[WatchFinding],
    cause: Cause,
    rank: int,
    why: str,
    *,
    place: str,
    nodes: int,
) -> Response:
    """What the ladder says. `place`: the node of that rank, one of `nodes`; `known`: what was found before."""
    settings = duty.settings
    if not duty.replaced:  # a node that leaves would end the job
        settings = msgspec.structs.replace(settings, same_place=NEVER, slow_action="tell")
    ended = [one for one in findings if one.ends]
    fixed = duty.least >= duty.world  # then the starter of the nodes gives another one
    left = Survivors(
        layout=Layout(dp=duty.world),
        nodes=tuple(range(nodes)),
        failures=len(ended) + 1,
        ranks_per_node=max(1, duty.world // nodes),
        spares=(nodes,) if duty.replaced and fixed else (),
        strikes={0: sum(one.place == place for one in ended) + 1},
    )
    incident = Incident(cause=cause, why=why, rank=rank, node=0)
    return respond(incident, left, settings, lambda layout: layout.world() >= duty.least)
