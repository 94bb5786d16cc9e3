"""Placement of requests on servers, or in the router's queue.

    place --> the best server of those that are up and have room
        |---> waits: none is up, or full (`hold_s`); or its best server computes other prompts (`late_binding`)
    place_next --> those that wait, by priority and key; whenever a server has answered or ended

Functions over a router, as `failing_servers` are.
"""

from math import inf
from typing import TYPE_CHECKING

from cairn.fleet.deadlines import by_deadline
from cairn.fleet.late_binding import LATE, bind, runs_dry
from cairn.fleet.refusals import unknown_model, why_nobody
from cairn.fleet.routing_policy import sent_at_once, wait_for_answers_s
from cairn.fleet.views import Choice
from cairn.fleet.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cairn.fleet.exchange import Exchange
    from cairn.fleet.router import Router
    from cairn.fleet.scaling_policy import ScaledModel

MOST_WAITING_REQUESTS = 8192  # requests that wait; more are refused


def place(router: "Router", exchange: "Exchange", now: float, placed: bool = False) -> None:
    """Send a request to the best server, or queue it. `placed`: it is next in the queue."""
    model, attempts = exchange.model, exchange.attempts_without_token
    if attempts and attempts >= router.config.attempts * max(len(router.workers), 1):
        said = f"{attempts} attempts in a row have brought no token"
        exchange.give_up(502, said, "no_server_answers")
        return
    workers = router.eligible(now, model, exchange.tried, exchange.computes)
    if not workers:
        _wait_for_server(router, exchange, now)
        return
    may_wait = exchange.computes and not placed and not exchange.attempts
    ask = exchange.ask if may_wait else sent_at_once(exchange.ask)
    choice, new = router.choose(ask, exchange.keys, workers, now)
    if may_wait and (
        model in router.waiting.models
        or (exchange.streams and _binds_later(router, exchange, choice))
    ):
        exchange.new_tokens = new
        if router.scaled:
            router.meter_once(exchange, new * choice.chosen.token_s, now)
        if _queue(router, exchange):
            place_next(router, now)
    else:
        router.send(exchange, choice, new, now)


def _binds_later(router: "Router", exchange: "Exchange", choice: Choice) -> bool:
    """Does the best server of a stream compute other prompts, or end short answers? Later another one may be best."""
    if not _late(router, exchange.model, len(choice.workers)):
        return False
    chosen = choice.candidates[choice.position]
    return not runs_dry(choice.chosen) or wait_for_answers_s(exchange.ask, chosen) > 0


def _late(router: "Router", model: str | None, servers: int) -> bool:
    """Is there a choice that is worth waiting for: of servers, or of the order where a time is promised?"""
    chosen = servers > 1 or (servers == 1 and router.promised_s(model) < inf)
    return chosen and router.config.policy in LATE


def _wait_for_server(router: "Router", exchange: "Exchange", now: float) -> None:
    """No server can take it now. It is refused if none ever will, or if it has waited for too long."""
    model = exchange.model
    if (refusal := unknown_model(router, model)) is not None:
        exchange.give_up(404, refusal, "model_not_found")
    elif now >= exchange.waits_since_s + router.config.hold_s:
        exchange.give_up(503, why_nobody(router, model, now), "no_server")
    elif _queue(router, exchange):
        if not exchange.attempts:  # nothing is known to be cached
            exchange.new_tokens = exchange.ask.prompt_tokens
        router.meter(model, now, 0.0)
        if router.on_waiting is not None:
            router.on_waiting()


def _queue(router: "Router", exchange: "Exchange") -> bool:
    """Queue a request; returns False if it was refused because the queue is full."""
    queue = router.waiting
    if not exchange.attempts and len(queue) >= MOST_WAITING_REQUESTS:
        exchange.give_up(429, f"{len(queue)} requests wait already", "too_many_waiting")
        return False
    exchange.tried = frozenset()
    queue.add(exchange, exchange.model, exchange.holder, exchange.priority)
    return True


def place_next(router: "Router", now: float) -> None:
    """Place as many waiting requests as there is capacity for."""
    if router.placing:  # one of them has ended at once
        return
    router.placing, queue = True, router.waiting
    try:
        models = list(queue.models)
        while models := [one for one in models if queue.waits(one)]:
            model = queue.next_model(models)
            if not _place_one(router, model, now):
                models.remove(model)
    finally:
        router.placing = False


def _place_one(router: "Router", model: str | None, now: float) -> bool:
    """Place one of the requests that wait for this model; False if none can be sent now."""
    workers = router.eligible(now, model)
    if not workers and unknown_model(router, model) is None:
        return False
    if not _late(router, model, len(workers)):
        if (exchange := router.waiting.take(model)) is not None:
            place(router, exchange, now, placed=True)
        return True
    if not any(map(runs_dry, workers)):
        return False
    lines, ttft_s = router.waiting.lines(model), router.promised_s(model)
    waiting = (one for line in lines for one in by_deadline(line, workers, ttft_s, now))
    if (bound := bind(waiting, workers, router.index, router.policy, now)) is None:
        return False
    exchange, at = bound.request, bound.place
    router.waiting.remove(exchange)
    choice = Choice(router.config.policy, workers[at], at, workers, bound.seen, bound.costs)
    new = exchange.ask.prompt_tokens - bound.seen[at].cached_tokens
    router.send(exchange, choice, max(new, 1), now)
    return True


def place_waiting(router: "Router", now: float) -> None:
    """Place waiting requests. One that exceeded the maximum wait goes to the best server, or is refused."""
    place_next(router, now)
    before = now - router.config.hold_s
    for exchange in [one for one in router.waiting if one.waits_since_s <= before]:
        router.waiting.remove(exchange)
        place(router, exchange, now, placed=True)


def waiting_for(router: "Router", model: "ScaledModel") -> int:
    """Requests for this model that wait for a server."""
    waiting = sum(model.serves(exchange.model) for exchange in router.waiting)
    return waiting + sum(map(model.serves, router.picking.values()))


def wait_s(router: "Router", model: "ScaledModel", up: "Sequence[Worker]") -> float:
    """Until the first token of a request for this model that comes now: prompts at its servers, and those that wait."""
    if not up:
        return 0.0
    speeds = [one.token_s for one in up]
    at_best_s = min(one.queued_tokens * token_s for one, token_s in zip(up, speeds, strict=True))
    tokens = sum(one.new_tokens for one in router.waiting if model.serves(one.model))
    return at_best_s + tokens * min(speeds) / len(up)
