"""Document with the state of the engine, and the model card.

    stats, steps, pages  (of the engine, wherever it runs)  +  the book  +  the floor  -->  EngineView

One document serves all who ask within a quarter of a second, so many open pages cost as much as one. The rates
are differences of totals that are kept for a few seconds. Belongs to the thread of the event loop.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cairn import __version__
from cairn.models.cache import CacheGroup
from cairn.serve.engine.messages import Stats
from cairn.serve.engine.step_times import StepTimes
from cairn.serve.http.ledger.floor import Floors
from cairn.serve.http.ledger.recent_ledgers import RecentLedgers, percentiles
from cairn.serve.http.ledger.views import (
    BatchView,
    DraftsView,
    EngineView,
    GroupView,
    LatencyView,
    ModelView,
    PagesView,
    PrefixView,
    RateView,
    StepView,
)
from cairn.serve.http.protocol.answers import Health
from cairn.serve.http.server.admission import Admission
from cairn.serve.http.server.counts import Gaps
from cairn.serve.serving import Serving

FRESH_S = 0.25  # how long a document is served again
WATCH_S = 3.0  # how long the engine is asked to keep itself visible
RATE_S = 5.0
SHOWN = 120  # steps
DIGITS = 7  # of the seconds of a step


class Totals(NamedTuple):
    at: float
    prompt: int
    output: int


class Rates:
    """Tokens per second, from totals that are read now and then."""

    def __init__(self, over_s: float = RATE_S) -> None:
        self._over_s = over_s
        self._seen: deque[Totals] = deque()

    def see(self, totals: Totals) -> None:
        newest = self._seen
        if newest and totals.prompt + totals.output < newest[-1].prompt + newest[-1].output:
            newest.clear()  # another engine counts from the beginning
        if newest and totals.at <= newest[-1].at:
            return
        newest.append(totals)
        while len(newest) > 2 and newest[1].at <= totals.at - self._over_s:
            newest.popleft()

    def view(self) -> RateView:
        if len(self._seen) < 2:
            return RateView(prompt_tokens_per_s=0.0, output_tokens_per_s=0.0)
        first, last = self._seen[0], self._seen[-1]
        took = last.at - first.at
        return RateView(
            prompt_tokens_per_s=round((last.prompt - first.prompt) / took, 3),
            output_tokens_per_s=round((last.output - first.output) / took, 3),
        )


class EngineLook:
    def __init__(
        self,
        serving: Serving,
        book: RecentLedgers,
        gaps: Gaps,
        admission: Admission,
        health: Callable[[], Health],
    ) -> None:
        self._serving, self._book, self._gaps = serving, book, gaps
        self._admission, self._health = admission, health
        self._rates = Rates()
        self._made: EngineView | None = None
        self._made_at = 0.0

    def sample(self, stats: Stats) -> None:
        """Now and then, so that a rate is known when a page is opened."""
        self._rates.see(Totals(stats.at, stats.prompt_tokens, stats.output_tokens))

    def view(self) -> EngineView:
        now = time.monotonic()
        if self._made is None or now - self._made_at > FRESH_S:
            self._made, self._made_at = self._make(now), now
        return self._made

    def _make(self, now: float) -> EngineView:
        serving, book = self._serving, self._book
        engine = serving.engine
        engine.watch(WATCH_S)
        health, stats, steps = self._health(), engine.stats(), engine.recent()[-SHOWN:]
        self.sample(stats)
        latency = book.latency()
        return EngineView(
            time=time.time(), model=serving.model(None).name, status=health.status, steps=stats.steps,
            running=stats.running, waiting=stats.waiting, preempted=stats.preempted,
            open_requests=self._admission.inside, pages=self._pages(stats),
            prefix=PrefixView(looked_up_tokens=stats.prefix_tokens, hit_tokens=stats.prefix_hits),
            rate=self._rates.view(), batch=self._batch(steps, stats),
            latency=LatencyView(ttft_s=latency.ttft_s, itl_s=percentiles(self._gaps.recent), e2e_s=latency.e2e_s),
            recent=[step_view(step, now, book.floors) for step in steps],
            drafts=DraftsView(runs=stats.draft_runs, tokens=stats.drafted, accepted=stats.accepted,
                              accepted_at=stats.accepted_at),
        )  # fmt: skip

    def _pages(self, stats: Stats) -> PagesView:
        limits = self._serving.limits
        total = stats.pages or limits.pages - 1  # before the first beat
        drawn = self._serving.engine.page_map()
        return PagesView(
            total=total,
            used=stats.pages_used,
            cached=stats.pages_cached,
            free=total - stats.pages_used - stats.pages_cached,
            size_tokens=limits.page_size,
            map=drawn.held,
            map_groups=drawn.groups,
            groups=group_views(limits.groups, stats.groups_used),
        )

    def _batch(self, steps: Sequence[StepTimes], stats: Stats) -> BatchView:
        """View of the newest step; empty if nothing runs."""
        newest = steps[-1] if steps and stats.running else StepTimes(0, 0, 0, 0, 0, 0, 0, 0)
        return BatchView(
            sequences=newest.sequences,
            decode_tokens=newest.tokens - newest.prefill,
            prefill_tokens=newest.prefill,
            budget_tokens=self._serving.limits.step_tokens,
        )


def group_views(groups: Sequence[CacheGroup], used: Sequence[int]) -> list[GroupView]:
    """Empty where all layers keep the same."""
    if len(groups) == 1:
        return []
    counts = used or [0] * len(groups)  # before the first beat
    return [
        GroupView(kind=group.kind, window=group.window, layers=len(group.layers), used=count)
        for group, count in zip(groups, counts, strict=True)
    ]


def step_view(step: StepTimes, now: float, floors: Floors) -> StepView:
    floor = floors.of_step(step) if step.tokens else None
    bound = floor.bound if floor is not None else None
    return StepView(
        number=step.number,
        ended=round(max(now - step.ended, 0.0), DIGITS),
        sequences=step.sequences,
        tokens=step.tokens,
        schedule_s=round(step.schedule, DIGITS),
        launch_s=round(step.launch, DIGITS),
        wait_s=round(step.wait, DIGITS),
        update_s=round(step.update, DIGITS),
        total_s=round(step.total, DIGITS),
        floor_s=None if floor is None else floor.seconds,
        limited_by=bound if bound != "launch" else None,
    )


def model_card(serving: Serving, floors: Floors, source: str) -> ModelView:
    """`source`: the path or name that the model was loaded from, which is not shown."""
    spec, facts, limits = serving.opened.spec, serving.facts, serving.limits
    name = serving.model(None).name
    device = f"{facts.device} ({facts.device_name})" if facts.device_name else facts.device
    if facts.ranks > 1:
        device = f"{facts.ranks} x {device}"
    notes = [note.replace(source, name) for note in serving.notes]
    return ModelView(
        name=name, names=list(serving.models), family=spec.family, parameters=spec.parameters(),
        layers=spec.layers, hidden=spec.hidden, heads=spec.heads, kv_heads=spec.kv_heads, vocabulary=spec.vocab,
        context=limits.context, dtype=facts.dtype or None, device=device or None,
        weights_bytes=facts.weights_bytes * facts.ranks or None,
        kv_bytes_per_token=round(facts.kv_bytes_per_token * facts.ranks) or None, pages=limits.pages - 1,
        cache_bytes=facts.page_bytes * facts.ranks * (limits.pages - 1) or None, cache_groups=len(limits.groups),
        page_size=limits.page_size, notes=notes, version=__version__, ceilings=floors.view(),
        sees=serving.picture_input is not None,
    )  # fmt: skip
