"""Requests leave a server that hangs: one that is silent, or that reports itself healthy and sends no token.

Connections of a server that died break by themselves, and one that is stopped finishes what it has.
"""

from typing import TYPE_CHECKING

from cairn.fleet.pulse_client import PulseClient

if TYPE_CHECKING:
    from cairn.fleet.router import Router


async def follow(router: "Router", pulse: PulseClient) -> None:
    """Requests of a server that is silent go elsewhere; when one comes up, those that wait are placed."""
    while True:
        await pulse.changed.wait()
        pulse.changed.clear()
        if pulse.worker.state == "down" and pulse.silent:
            for exchange in [one for one in router.open if one.worker is pulse.worker]:
                if exchange.upstream is not None:
                    exchange.upstream.drop()
                    exchange.lost(pulse.worker.reason)
        else:
            router.place_waiting()


def leave_stuck(router: "Router", now_s: float) -> None:
    """Requests of a server that gives no tokens go elsewhere, where another one could answer them."""
    streaming = {one.worker for one in router.open if one.expects_tokens}
    limit_s = router.config.stuck_s
    reason = f"it has given no token for {limit_s:g} s or more"
    for worker in router.workers:
        rest_s = router.stuck_servers.rest_s(worker, worker in streaming, limit_s, now_s)
        if rest_s is None:
            continue
        for exchange in [one for one in router.open if one.worker is worker and one.computes]:
            if exchange.upstream is None or not exchange.movable:
                continue
            if router.eligible(now_s, exchange.model, {worker.number}):  # those before it took room
                worker.rest(now_s + rest_s, reason)
                exchange.upstream.drop()
                exchange.lost(reason)
