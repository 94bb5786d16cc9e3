"""The scheduler between a fake device and a reference, with everything checked that has to hold at every moment.

Tests choose the moments: what is added, aborted, scheduled and updated, and when.
"""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from fake_device import EOS, FakeDevice, reference
from noisy_drafter import NoisyDrafter

from cairn.core.errors import RequestError
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.speculate.speculation import Speculation
from cairn.serve.engine.step import Step

MOST_IN_FLIGHT = 2  # steps
Question = tuple[list[int], SamplingParams, int, str]  # prompt, parameters, priority, salt


class CheckedScheduler:
    def __init__(
        self, limits: Limits, prefix_caching: bool = True, accuracy: float = 0.0, **how: Any
    ) -> None:
        """`accuracy` of the drafts, of which `limits` says how many. `how`: as `Speculation` takes it."""
        self.limits = limits
        self.expected: dict[Request, list[int]] = {}
        drafter = NoisyDrafter(self.expected, accuracy, limits.vocabulary)
        self.scheduler = Scheduler(
            limits, prefix_caching=prefix_caching, speculation=Speculation(drafter, **how)
        )
        self.device = FakeDevice(limits)
        self.alive: list[Request] = []
        self.heard: dict[Request, list[int]] = {}  # what update reported
        self.in_flight: deque[tuple[Step, list[int]]] = deque()
        self.names = 0
        self.seen: Counter[str] = Counter()  # has the test met what it is there for?

    def add(
        self, prompt: list[int], params: SamplingParams, priority: int = 0, salt: str = ""
    ) -> Request | None:
        request = Request(self.names, prompt, params, priority=priority, salt=salt, eos_ids=(EOS,))
        self.names += 1
        try:
            self.scheduler.add(request)
        except RequestError:
            assert len(prompt) > self.limits.capacity
            return None
        self.alive.append(request)
        self.heard[request] = []
        self.expected[request] = reference(request, self.limits)
        return request

    def abort(self, request: Request) -> None:
        assert self.scheduler.abort(request.id) is request
        assert request.finish == "abort"
        assert request.outputs == self.expected[request][: len(request.outputs)]
        self.alive.remove(request)
        assert self.scheduler.abort(request.id) is None

    def schedule(self) -> Step:
        step = self._schedule()
        if step.chunks or step.failed:
            self.in_flight.append((step, self.device.launch(step)))
        return step

    def lose_a_step(self, followed: bool, arriving: Sequence[Question] = ()) -> None:
        """A step does not run: its requests end, and nobody finds what it should have written.

        `followed`: the next one was scheduled before this was known. It runs for those who can go on.
        """
        lost = self._schedule()
        for question in arriving:
            self.add(*question)
        following = self._schedule() if followed else None
        if lost.chunks:
            ended = [advance.request for advance in self.scheduler.fail(lost, "out of memory")]
            assert {chunk.request for chunk in lost.chunks} <= set(ended)
            for request in ended[len(lost.failed) :]:
                assert (request.finish, request.error) == ("error", "out of memory")
                self.alive.remove(request)
            self.seen["lost"] += len(ended)
            self.seen["lost with others"] += len(ended) - len(lost.failed) - len(lost.chunks)
        else:
            self.in_flight.append((lost, []))
        if following is not None:
            self.in_flight.append((following, self.device.launch(following)))

    def update(self) -> None:
        step, sampled = self.in_flight.popleft()
        for advance in self.scheduler.update(step, sampled):
            self.heard[advance.request] += advance.tokens
            assert self.heard[advance.request] == advance.request.outputs
            assert advance.finished == (advance.request.state == "finished")
            if advance.finished and advance.request.finish != "error":
                self._check_finished(advance.request)

    def run(self, depth: int = 0) -> None:
        """One turn of a loop that keeps `depth` steps in flight besides the one it schedules."""
        step = self.schedule()
        # An empty step: only what is in flight can change that.
        keep = depth if step.chunks else max(len(self.in_flight) - 1, 0)
        while len(self.in_flight) > keep:
            self.update()

    def drain_requests(self, depth: int = 0) -> None:
        """Everything that is left finishes, in a number of steps that its length bounds."""
        work = sum(request.end for request in self.alive)
        for _ in range(10 + 4 * work):
            if not self.alive:
                break
            self.run(depth)
            self.check()
        assert not self.alive, f"no progress: {self.alive}"
        while self.in_flight:
            self.update()

    def drain(self, depth: int = 0) -> None:
        """The same, and nothing is left behind."""
        self.drain_requests(depth)
        usage = self.scheduler.blocks.usage()
        assert (usage.used, usage.free) == (0, self.limits.pages - 1)
        assert (self.scheduler.waiting, self.scheduler.running) == (0, 0)
        self.scheduler.blocks.reset()
        assert self.scheduler.blocks.usage().cached == 0

    def check(self) -> None:
        self.scheduler.queues.check_integrity()
        assert self.scheduler.has_work == bool(self.alive)
        assert self.scheduler.running <= self.limits.rows
        for request in self.alive:
            assert request.outputs == self.expected[request][: len(request.outputs)]
        self._check_sharing()
        self._check_windows()

    # -- what has to hold ------------------------------------------------------------------------

    def _schedule(self) -> Step:
        before = list(self.scheduler.queues.running)
        decoding = any(r.total - r.computed <= 1 and r.total > r.prefill_until for r in before)
        budget = self.limits.budget(decoding)
        self.seen["shared budget"] += budget < self.limits.step_tokens
        decoding = [request for request in before if self.scheduler._may_decode(request)]
        step = self.scheduler.schedule()
        self._check_budget(step, budget)
        self._check_order(step, before, decoding, budget)
        self._check_decoding(step, before, decoding)
        for request in step.failed:
            self._check_outgrown(request)
        self._note(step)
        return step

    def _note(self, step: Step) -> None:
        self.seen["preempted"] += len(step.preempted)
        self.seen["preempted in flight"] += sum(r.pending > 0 for r in step.preempted)
        self.seen["outgrown"] += len(step.failed)
        self.seen["ahead of the host"] += bool(step.chunks and self.in_flight)
        self.seen["drafts"] += sum(map(len, step.drafts))
        self.seen["ahead of drafts"] += sum(chunk.ahead for chunk in step.chunks)
        self.seen["drafts ahead of drafts"] += sum(
            len(chunk.drafts) for chunk in step.chunks if chunk.ahead
        )
        admitted = [chunk for chunk in step.chunks if chunk.first_page == 0]
        self.seen["prefix hit"] += sum(chunk.start > 0 for chunk in admitted)
        pages = [page for chunk in admitted for page in chunk.pages if page]
        self.seen["restored"] += len(step.restores)
        self.seen["saved"] += len(step.saves)
        self.seen["shared in one step"] += len(set(pages)) < len(pages)

    def _check_budget(self, step: Step, budget: int) -> None:
        assert step.tokens == sum(chunk.count for chunk in step.chunks) <= budget
        assert step.sampling == [chunk.request for chunk in step.chunks if chunk.samples]
        rows = [chunk.request.row for chunk in step.chunks]
        assert len(set(rows)) == len(rows)
        for chunk in step.chunks:
            request = chunk.request
            assert chunk.count >= 1
            assert chunk.start + chunk.count < request.end  # the last token is never computed
            assert len(request.outputs) + request.pending <= request.most_outputs
            if self.limits.prefill_chunk and not chunk.drafts:
                assert chunk.count <= self.limits.prefill_chunk

    def _check_order(
        self, step: Step, before: list[Request], decoding: list[Request], budget: int
    ) -> None:
        """Running first, in order; then the head of the line; nobody overtakes."""
        ran = [chunk.request for chunk in step.chunks]
        kept = [request for request in before if request in ran]
        assert ran == kept + step.admitted
        speculation = self.scheduler.speculation
        waits = speculation is not None and speculation.waits
        earlier = [other for other in self.scheduler._in_flight if other is not step]
        waits = waits and any(other.drafts for other in earlier)
        left_out = [r for r in before if r not in ran and r.state == "running" and r.total < r.end]
        unused = sum(r not in ran for r in decoding)  # tokens that were reserved in vain
        for request in left_out:
            alone = len(before) == 1 and request.pending > 0
            uncertain = request.drafted and len(request.outputs) < request.min_tokens
            assert alone or uncertain or waits or step.tokens + unused >= budget
        line = list(self.scheduler.queues.waiting)
        places = [self._place(request) for request in (*step.admitted, *line)]
        assert places == sorted(places)
        assert not (step.preempted and step.admitted)
        for request in step.preempted:
            assert all((request.priority, request.arrival) > (r.priority, r.arrival) for r in ran)

    def _check_decoding(self, step: Step, before: list[Request], decoding: list[Request]) -> None:
        """In a step that computes a prompt, each request runs that may decode and has its pages."""
        ran = {chunk.request for chunk in step.chunks}
        prompts = [chunk for chunk in step.chunks if chunk.request not in decoding]
        for request in decoding if prompts else ():
            alone = len(before) == 1 and request.pending > 0
            uncertain = request.drafted and len(request.outputs) < request.min_tokens
            assert request in ran or request.state != "running" or alone or uncertain
            first = (
                before.index(prompts[0].request) if prompts[0].request in before else len(before)
            )
            self.seen["decoded after a prompt"] += before.index(request) > first

    def _place(self, request: Request) -> tuple[int, ...]:
        length = len(request.prompt) if self.limits.policy == "shortest" else 0
        return request.priority, length, request.arrival

    def _check_outgrown(self, request: Request) -> None:
        assert request.finish == "error"
        assert request.error is not None
        assert str(self.limits.pages - 1) in request.error
        assert request.known > self.limits.capacity
        self.alive.remove(request)

    def _check_finished(self, request: Request) -> None:
        assert request.outputs == self.expected[request]
        assert request.finish == ("stop" if self._stopped(request) else "length")
        self.seen[request.finish] += 1
        self.alive.remove(request)

    def _stopped(self, request: Request) -> bool:
        last, params = request.outputs[-1], request.params
        eos = last == EOS and not params.ignore_eos
        assert request.stop_reason is None or not eos
        return (eos or last in params.stop_token_ids) and len(request.outputs) >= params.min_tokens

    def _check_windows(self) -> None:
        """A window holds what it sees, the page that is written, and what tokens in flight may have to see again."""
        size = self.limits.page_size
        for request in self.scheduler.queues.running:
            if request.computed < request.prefill_until + size:
                continue  # the pages of a chunk are freed when the next page is needed
            for group, table in zip(self.limits.groups, _tables(request), strict=False):
                held = sum(page > 0 for page in table)
                self.seen["window"] += held < len(table)
                if group.kind == "window":
                    lag = MOST_IN_FLIGHT + 3 * self.limits.drafts  # of all steps in flight
                    assert held <= -(-(group.window - 1 + lag) // size) + 1

    def _check_sharing(self) -> None:
        """A page in two tables stands at the same place, in the same group, behind the same tokens and salt."""
        size = self.limits.page_size
        for one, other in combinations(self.scheduler.queues.running, 2):
            theirs = _places(other)
            for page, place in _places(one).items():
                if page not in theirs:
                    continue
                assert theirs[page] == place
                assert one.salt == other.salt
                end = (place[1] + 1) * size
                assert (one.prompt + one.outputs)[:end] == (other.prompt + other.outputs)[:end]


def _tables(request: Request) -> list[list[int]]:
    return [request.blocks, *request.more_blocks]


def _places(request: Request) -> dict[int, tuple[int, int]]:
    """Of each page: its group, and its place in the table."""
    tables = enumerate(_tables(request))
    return {page: (g, at) for g, table in tables for at, page in enumerate(table) if page}
