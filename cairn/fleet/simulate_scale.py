"""Simulation of autoscaling on a trace, compared with a fixed number of servers.

    every second: LoadMeter.seen -> decide -> servers start (and answer after start_s), or leave when they are done

Requests wait in the router while no server is ready. What is paid for is the time of servers, from start to end.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

from cairn.fleet.scaling_policy import LoadMeter, Rules, decide
from cairn.fleet.simulate import Outcome, Simulated, Slo, outcome_of, span_s
from cairn.fleet.simulate_prompts import Prompt
from cairn.fleet.simulate_replica import Replica, StepSeconds, speed_of
from cairn.fleet.worker import candidates
from cairn.serve.engine.request import Limits

TICK_S = 1.0


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Outcome
    server_hours: float
    good_per_server_hour: float
    most_servers: int
    changes: int


class ScaledRun:
    def __init__(
        self, policy: str, limits: Limits, step_seconds: StepSeconds, rules: Rules
    ) -> None:
        self.rules, self.limits, self.step_seconds = rules, limits, step_seconds
        self.speed = speed_of(step_seconds)
        self.simulated = Simulated(policy, limits, rules.ttft_s)
        self.meter = LoadMeter()
        self.starting: deque[tuple[float, Replica]] = deque()  # and when it answers
        self.all: list[Replica] = []
        self.began_s: dict[int, float] = {}
        self.ended_s: dict[int, float] = {}
        self.held: deque[tuple[Prompt, float]] = deque()
        self.changes = self.most = 0

    def start(self, now_s: float, ready_s: float) -> None:
        replica = Replica(len(self.all), self.limits, self.step_seconds, self.speed)
        self.all.append(replica)
        self.began_s[replica.worker.number] = now_s
        self.starting.append((ready_s, replica))

    def arrive(self, prompt: Prompt, at_s: float) -> None:
        self.simulated.advance(at_s)
        self.held.append((prompt, at_s))
        self.meter.arrived(at_s, 0.0)
        self._place(at_s)

    def tick(self, now_s: float) -> None:
        self.simulated.advance(now_s)
        while self.starting and self.starting[0][0] <= now_s:
            self.simulated.join(self.starting.popleft()[1])
        self._place(now_s)
        self._end_idle(now_s)
        replicas = self.simulated.replicas
        waits = [one.worker.queued_tokens * self.speed.token_s for one in replicas]
        waiting = self.simulated.waiting
        behind_s = sum(one.new_tokens for one in waiting) * self.speed.token_s
        seen = self.meter.seen(
            now_s,
            ready=len(replicas),
            starting=len(self.starting),
            held=len(self.held) + len(waiting),
            in_flight=sum(one.worker.waiting + one.worker.decoding for one in replicas),
            wait_s=min(waits, default=0.0) + behind_s / max(len(replicas), 1),
        )
        self._change(decide(seen, self.rules), now_s)

    def _change(self, target: int, now_s: float) -> None:
        have = len(self.simulated.replicas) + len(self.starting)
        if target == have:
            return
        self.meter.changed_s = now_s
        self.changes += 1
        for _ in range(target - have):
            self.start(now_s, now_s + self.rules.start_s)
        for _ in range(have - target):
            if self.simulated.replicas:
                seen = candidates([one.worker for one in self.simulated.replicas], {})
                requests = [one.requests for one in seen]
                self.simulated.leave(self.simulated.replicas[requests.index(min(requests))])
        self.most = max(self.most, target)

    def _place(self, now_s: float) -> None:
        while self.held and self.simulated.replicas:
            prompt, arrived_s = self.held.popleft()
            new = self.simulated.place(prompt, arrived_s, now_s)
            self.meter.arrived(now_s, new * self.speed.token_s, arrived_s)

    def _end_idle(self, now_s: float) -> None:
        for replica in [one for one in self.simulated.leaving if not one.scheduler.has_work]:
            self.simulated.leaving.remove(replica)
            self.ended_s[replica.worker.number] = now_s


def run_scaled(
    prompts: Sequence[Prompt],
    load: float,
    rules: Rules,
    limits: Limits,
    step_seconds: StepSeconds,
    slo: Slo,
    policy: str = "seconds",
) -> Scaled:
    """`load`: of what `rules.most` servers could compute if nothing were cached."""
    run = ScaledRun(policy, limits, step_seconds, rules)
    for _ in range(max(rules.least, 0)):
        run.start(0.0, 0.0)
    span = span_s(prompts, run.speed, rules.most, load)
    slower, now_s = span / max(prompts[-1].traced.at_s, 1e-9), 0.0
    run.tick(0.0)
    for prompt in prompts:
        at_s = prompt.traced.at_s * slower
        while now_s + TICK_S <= at_s:
            now_s += TICK_S
            run.tick(now_s)
        run.arrive(prompt, at_s)
    simulated = run.simulated
    while run.held or simulated.waiting or any(one.scheduler.has_work for one in run.all):
        now_s += TICK_S
        run.tick(now_s)
    hours = sum(run.ended_s.get(n, now_s) - at for n, at in run.began_s.items()) / 3600
    outcome = outcome_of(policy, load, run.simulated.requests, run.all, slo)
    good = outcome.good_share * outcome.requests
    return Scaled(
        outcome=outcome,
        server_hours=hours,
        good_per_server_hour=good / max(hours, 1e-9),
        most_servers=max(run.most, rules.least),
        changes=run.changes,
    )
