"""The server's accounts: the meter fed by the engine's totals and the energy counter, and why each prefix was missed.

    every second   totals of the engine, joules of the GPU  -->  shares of the requests that advanced
    at each end    tokens to the key; the prompt against those before it

Belongs to the thread of the event loop.
"""

import time
from collections.abc import Callable, Iterable

from cairn.core.metrics import Metrics
from cairn.hw.energy import EnergyCounter
from cairn.serve.engine.messages import Stats
from cairn.serve.http.ledger.entry import Entry
from cairn.serve.http.ledger.meter import Advanced, Meter
from cairn.serve.http.ledger.prefix_history import Miss, PrefixHistory, sentence
from cairn.serve.http.ledger.views import KeyView, UsageView
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.job import Job

Decode = Callable[[list[int]], str]
DIGITS = 6


class Accounts:
    def __init__(
        self,
        page_size: int,
        tokens_per_day: int | None = None,
        decode: Decode | None = None,
        energy: EnergyCounter | None = None,
    ) -> None:
        """`decode`: makes the words around a change, if they may be shown."""
        self.meter = Meter(tokens_per_day)
        self._history = PrefixHistory(page_size)
        self._decode, self._energy = decode, energy
        self._joules = None if energy is None else energy.joules()
        self._device_s = 0.0
        self._settled: list[Entry] = []  # since the last tick
        self._told: dict[tuple[str, str], float] = {}  # what the metrics have

    # -- requests --------------------------------------------------------------------------------

    def check_budget(self, key: str) -> None:
        """Refuses a key that has used up its day."""
        now = time.time()
        if self.meter.budget_left(key, now) == 0:
            most = self.meter.tokens_per_day
            raise Refusal(
                429,
                f"this key may use {most} tokens in a day, and has used them",
                code="key_budget",
                retry_after_s=self.meter.next_day_s(now),
            )

    def explain(self, entry: Entry, jobs: Iterable[Job]) -> None:
        """Explain the cache result of a finished request's first prompt, and remember its prompts for later ones."""
        now, prompts = time.monotonic(), {id(job.request.prompt): job for job in reversed([*jobs])}
        for job in reversed(prompts.values()):
            request = job.request
            owner = request.salt.encode() + b"\0" + request.identity
            if entry.miss is None:
                miss = self._miss(job, owner, now, entry.arrived)
                entry.miss, entry.miss_text = miss.cause, sentence(miss, self._words(miss))
            self._history.add(request.prompt, owner, now)

    def _miss(self, job: Job, owner: bytes, now: float, arrived: float) -> Miss:
        request = job.request
        if request.params.whole_prompt:
            return Miss("off")
        return self._history.explain(request.prompt, owner, request.cached, now, arrived)

    def _words(self, miss: Miss) -> tuple[str, str] | None:
        if self._decode is None or not miss.now:
            return None
        return self._decode(list(miss.before)), self._decode(list(miss.now))

    def settle(self, entry: Entry) -> None:
        self._settled.append(entry)
        self.meter.count(entry.key, entry.prompt, entry.cached, entry.outputs, time.time())

    # -- every second ----------------------------------------------------------------------------

    def tick(self, stats: Stats, running: Iterable[Entry]) -> None:
        settled, self._settled = self._settled, []
        advanced = [Advanced(one.key, one.advanced(), one.bill) for one in [*settled, *running]]
        device_s = max(
            stats.device_s - self._device_s, 0.0
        )  # an engine that was restarted counts from 0
        self._device_s = stats.device_s
        self.meter.tick(device_s, self._taken(), advanced)

    def _taken(self) -> float:
        """Joules since the last tick."""
        if self._energy is None or self._joules is None:
            return 0.0
        now = self._energy.joules()
        if now is None:
            return 0.0
        taken, self._joules = max(now - self._joules, 0.0), now
        return taken

    # -- what is shown ---------------------------------------------------------------------------

    def view(self, stats: Stats, lag_s: float) -> UsageView:
        now, is_measured = time.time(), self._joules is not None
        keys = [
            KeyView(
                key=name,
                requests=usage.requests,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                output_tokens=usage.output_tokens,
                device_s=round(usage.device_s, DIGITS),
                joules=round(usage.joules, DIGITS) if is_measured else None,
                today_tokens=usage.today_tokens,
                today_left=self.meter.budget_left(name, now),
            )
            for name, usage in sorted(self.meter.keys.items())
        ]
        return UsageView(
            keys=keys,
            idle_device_s=round(self.meter.idle_s, DIGITS),
            idle_joules=round(self.meter.idle_joules, DIGITS) if is_measured else None,
            engine_prompt_tokens=stats.prompt_tokens,
            engine_output_tokens=stats.output_tokens,
            engine_device_s=round(stats.device_s, DIGITS),
            event_loop_lag_s=round(lag_s, DIGITS),
        )

    def count(self, metrics: Metrics, model: str) -> None:
        """Bring the counters of each key up to date."""
        for name, usage in self.meter.keys.items():
            kinds = {
                "prompt": usage.prompt_tokens,
                "cached": usage.cached_tokens,
                "output": usage.output_tokens,
            }
            for kind, total in kinds.items():
                self._add(
                    metrics, "cairn_key_tokens_total", total, model=model, key=name, kind=kind
                )
            self._add(
                metrics, "cairn_key_device_seconds_total", usage.device_s, model=model, key=name
            )
            self._add(metrics, "cairn_key_joules_total", usage.joules, model=model, key=name)

    def _add(self, metrics: Metrics, metric: str, total: float, **labels: str) -> None:
        place = (metric, " ".join(labels.values()))
        metrics.add(metric, total - self._told.get(place, 0.0), **labels)
        self._told[place] = total
