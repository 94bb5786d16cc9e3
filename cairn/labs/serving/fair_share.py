"""One tenant floods the service. What is left for the others?

    first come     the light tenant waits behind everything the heavy one has sent
    fair           the tenant that was served the fewest tokens goes next (a virtual token counter for each tenant)

The engine's scheduler serves; the counter decides who is handed to it. With the counter the two shares can never drift
apart by more than what is in flight, whatever the flood.
"""

import random
from collections import deque
from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Plot, Rows, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.serve.engine.request import Request

ROWS, STEP_S, PROMPT, OUTPUTS = 8, 0.02, 16, 24
Line = list[tuple[float, str, "Request"]]


class Counters:
    """Queues by tenant, and the tokens that each has been granted."""

    def __init__(self, fair: bool) -> None:
        self.fair = fair
        self.queues: dict[str, deque[Request]] = {}
        self.served: dict[str, float] = {}
        self.order: deque[str] = deque()  # of arrival

    def push(self, tenant: str, request: "Request") -> None:
        queue = self.queues.setdefault(tenant, deque())
        if not queue:  # a tenant that was away has saved nothing up
            busy = [self.served[name] for name, line in self.queues.items() if line]
            self.served[tenant] = max(self.served.get(tenant, 0.0), min(busy, default=0.0))
        queue.append(request)
        self.order.append(tenant)

    def pop(self) -> "tuple[str, Request] | None":
        waiting = [tenant for tenant, queue in self.queues.items() if queue]
        if not waiting:
            return None
        if self.fair:
            tenant = min(waiting, key=lambda name: (self.served[name], name))
            self.order.remove(tenant)
        else:
            tenant = self.order.popleft()
        request = self.queues[tenant].popleft()
        self.served[tenant] += len(request.prompt) + OUTPUTS
        return tenant, request


def trace(seconds: float) -> Line:
    from cairn.labs.serving._engine import ask

    draw = random.Random(9)
    arrivals: Line = []
    for tenant, rate in (("heavy", 60.0), ("light", 6.0)):
        at = 0.0
        while (at := at + draw.expovariate(rate)) < seconds:
            arrivals.append((at, tenant, ask(len(arrivals), [1] * PROMPT, OUTPUTS)))
    return sorted(arrivals, key=lambda one: one[0])


def serve(line: Line, fair: bool) -> tuple[dict[str, list[float]], float]:
    """Seconds to the first token by tenant, and how far granted tokens drifted apart while both waited."""
    from cairn.labs.serving._fleet import Replica
    from cairn.serve.engine.request import Limits

    limits = Limits(rows=ROWS, step_tokens=512, context=128, pages=512, page_size=16, vocabulary=64)
    engine = Replica(limits, lambda step: STEP_S, prefix_caching=False)
    counters, coming, drift = Counters(fair), deque(line), 0.0
    while coming or engine.scheduler.has_work or any(counters.queues.values()):
        if not engine.scheduler.has_work and not any(counters.queues.values()):
            engine.now = max(engine.now, coming[0][0])
        while coming and coming[0][0] <= engine.now:
            at, tenant, request = coming.popleft()
            request.ledger.arrived = at
            counters.push(tenant, request)
        while engine.load < ROWS and (given := counters.pop()) is not None:
            engine.scheduler.add(given[1])
        if all(counters.queues.get(name) for name in ("heavy", "light")):
            drift = max(drift, abs(counters.served["heavy"] - counters.served["light"]))
        if engine.scheduler.has_work:
            engine.advance(engine.now + STEP_S / 2)  # one step
    times: dict[str, list[float]] = {"heavy": [], "light": []}
    for _, tenant, request in line:
        times[tenant].append(request.ledger.first_token - request.ledger.arrived)
    return {tenant: sorted(values) for tenant, values in times.items()}, drift


def run(bench: Workbench) -> Outcome:
    seconds = bench.setting("seconds", bench.pick(40.0, 12.0))
    rows, lights, drifts = [], {}, {}
    for fair in (False, True):
        name = "fair" if fair else "first come"
        bench.step(f"{name}: a tenant sends ten times as much as the other")
        times, drifts[name] = serve(trace(seconds), fair)
        lights[name] = times["light"]
        middle = {tenant: values[len(values) // 2] for tenant, values in times.items()}
        rows.append([name, middle["heavy"], middle["light"], times["light"][-1], drifts[name]])
    one = PROMPT + OUTPUTS
    # The tenant that is behind is next: it waits until a row is free, at most one answer, and for its own first step.
    foreseen = OUTPUTS * STEP_S + STEP_S
    median = lights["fair"][len(lights["fair"]) // 2]
    return Outcome(
        checks=[
            Check(
                what=Words("tokens by which the two may drift apart", "两个租户服务量之差的上界"),
                predicted=2 * one,
                measured=drifts["fair"],
                unit="tokens",
                kind="at_most",
            ),
            Check(
                what=Words("light tenant's first token, fair", "公平策略下轻租户的 TTFT 中位数"),
                predicted=foreseen * 1e3,
                measured=median * 1e3,
                unit="ms",
                kind="at_most",
            ),
            Check(
                what=Words(
                    "light tenant's first token, first come over fair",
                    "轻租户 TTFT：先来先服务 / 公平",
                ),
                predicted=10,
                measured=lights["first come"][len(lights["first come"]) // 2] / median,
                unit="x",
                kind="at_least",
            ),
        ],
        plots=[_plot(lights)],
        table=_table(rows),
    )


def _plot(lights: dict[str, list[float]]) -> Plot:
    return Plot(
        title=Words("Light tenant: time to first token", "轻租户的 TTFT"),
        x=Words("requests, sorted", "请求（排序后）"),
        y=Words("seconds", "秒"),
        lines={
            name: [(float(i), s) for i, s in enumerate(values)] for name, values in lights.items()
        },
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("policy", "策略"),
            Words("heavy, median TTFT s", "重租户 TTFT 中位（秒）"),
            Words("light, median TTFT s", "轻租户 TTFT 中位（秒）"),
            Words("light, worst s", "轻租户最差（秒）"),
            Words("drift, tokens", "服务差（token）"),
        ],
        rows=rows,
    )


LAB = described(__file__, run)
