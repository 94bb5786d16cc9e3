"""Is the engine getting anywhere? A server that answers "ok" while its engine hangs misleads its load balancer.

                                               status    /health  /live
    work and no step for longer than allowed   stalled   503      503
    the engine has ended                       dead      503      503      the server ends, with status 1
    it has failed, and is being started again  starting  503      200
    SIGTERM has come                           draining  503      200
    its memory was given back (POST /sleep)    asleep    200      200      a request wakes it
    else                                       ok        200      200

`/health` tells routers where to send requests (a readiness probe). `/live` tells a supervisor whether to kill the
process (a liveness probe), which would only lose more while the engine is being restarted or drains. Pure: its inputs
are arguments. It costs nothing, so a probe may come as often as it likes.
"""

import time
from collections.abc import Callable

from cairn.serve.engine.messages import Stats
from cairn.serve.http.protocol.answers import Health

HOPELESS = ("stalled", "dead")  # it will not get well by itself
READY = ("ok", "asleep")  # it takes requests


class Progress:
    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s, self._clock = patience_s, clock
        self._steps = -1
        self._since = clock()
        self.still_s = 0.0  # as `look` found it last

    def look(self, steps: int, busy: bool) -> float:
        """Seconds that the engine has had work and taken no step. `busy`: some is left in it, or waits for it."""
        now = self._clock()
        if steps != self._steps or not busy:
            self._steps, self._since = steps, now
        self.still_s = now - self._since
        return self.still_s

    def verdict(
        self,
        stats: Stats,
        busy: bool,
        dead: str | None,
        restarting: str | None,
        draining: bool,
        asleep: bool = False,
    ) -> Health:
        still = self.look(stats.steps, busy)
        counts = dict(running=stats.running, waiting=stats.waiting, steps=stats.steps)
        if dead is not None:
            return Health(status="dead", reason=dead, **counts)
        if restarting is not None:
            self.look(-1, busy=False)  # the time that a new one has begins when it is ready
            return Health(status="starting", reason=f"it starts again: {restarting}", **counts)
        if still > self._patience_s:
            reason = f"no step has ended for {still:.0f} s, with requests on their way"
            return Health(status="stalled", reason=reason, **counts)
        if draining:
            return Health(status="draining", reason="the server is stopping", **counts)
        return Health(status="asleep" if asleep else "ok", **counts)
