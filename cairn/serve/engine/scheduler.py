"""Scheduler: selects the requests and tokens of the next step.

Pure Python: no torch, no clock, no I/O. The engine's loop and the simulator both call `schedule`, and the ranks of a
tensor-parallel group call it in lock step: the same calls give the same decisions.

    add --> waiting --admit--> running --update--> finished
               ^----preempt-------'

One budget of tokens per step, a smaller one where a request decodes and would wait for the prompts of others. Each
request that decodes has one token of it, however urgent the prompts are that come before it. The rest goes to running
requests, oldest of the most urgent first, decode and prefill alike; what is left admits waiting ones. Pages for a whole
prompt are taken at admission, so that only decoding can run out of them: then the last of the running gives its pages
back and is computed again later.

`schedule` may be called again before `update` has brought the tokens of the step before. Positions then advance on
trust, and the token that the host does not know yet is taken on the device from the row's last sample. A request that
turns out to have stopped has run one step too many; that result is dropped. A request with a constraint is the
exception: what may come next depends on the token before, so it waits until that is known.

With a drafter, a decoding request computes its last token and the drafts behind it in one step, and a token is drawn
behind each. Drafts hold as far as they are what was drawn; `update` gives back the rest. Until then positions advance
as if all of them held, and the device, which knows better, corrects them (`Chunk.ahead`).
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from cairn.serve.engine.block_manager import BlockManager
from cairn.serve.engine.queues import Queues
from cairn.serve.engine.request import Finish, Limits, Request, RequestId
from cairn.serve.engine.spans import whole_end
from cairn.serve.engine.speculate.speculation import Speculation, check_drafts
from cairn.serve.engine.step import NO_TOKENS, Advance, Chunk, Step, joined
from cairn.serve.tiers.load_plan import Loading

NO_PAGES: tuple[int, ...] = ()


class Tiers(Protocol):
    """Tiers of the cache, as an admission sees them."""

    def begin(self, request: Request) -> None:
        """Set `request.loading` if pages of it are loaded."""
        ...


class Scheduler:
    def __init__(
        self,
        limits: Limits,
        *,
        prefix_caching: bool = True,
        blocks: BlockManager | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """`blocks`: a block manager that does more than manage, such as one that measures.

        `speculation`: counts where `limits` have room for drafts.
        """
        self.limits = limits
        check_drafts(limits)
        self.speculation = speculation if limits.drafts else None
        self.blocks = blocks or BlockManager(
            limits.pages,
            limits.page_size,
            prefix_caching=prefix_caching,
            groups=limits.groups,
            states=limits.states,
        )
        self.queues = self._make_queues()
        self.tiers: Tiers | None = None  # of the cache, beyond the device
        # Tokens of the next step besides one for each request; 0: `limits` rule.
        self.step_limit = 0
        self._in_flight: deque[Step] = deque()  # scheduled, not updated
        self._steps = 0

    def manage(self, blocks: BlockManager) -> None:
        """Use another block manager; there are no requests now. What was counted goes on."""
        before, self.blocks = self.queues.preemptions, blocks
        self.queues = self._make_queues()
        self.queues.preemptions = before

    def _make_queues(self) -> Queues:
        on_finish = self.speculation.finish if self.speculation is not None else None
        return Queues(self.limits, self.blocks, on_finish)

    @property
    def requests(self) -> dict[RequestId, Request]:
        """All that wait or run, by id."""
        return self.queues.requests

    @property
    def waiting(self) -> int:
        return len(self.queues.waiting)

    @property
    def running(self) -> int:
        return len(self.queues.running)

    @property
    def in_flight(self) -> int:
        """Number of scheduled steps whose results have not been processed."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        return bool(self.queues.requests)

    def add(self, request: Request) -> None:
        """Put a new request into the waiting queue, or refuse it with a RequestError."""
        self.queues.add(request)

    def abort(
        self, id: RequestId, reason: Finish = "abort", stop_reason: int | str | None = None
    ) -> Request | None:
        """End a request wherever it is; None when there is none of this id.

        Tokens of it that are in flight are dropped when they arrive. A reader that finds a stop string in the text ends
        the request here with the reason "stop".
        """
        request = self.requests.get(id)
        if request is not None:
            self.queues.finish(request, reason, stop_reason)
            self.queues.sweep()
        return request

    # -- the next step -------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Decide the next step. One without chunks: nothing can run before a step in flight is updated."""
        step = Step(self._steps)
        self._steps += 1
        if self._waits_for_drafts():
            return step
        if self.tiers is not None:
            self._requeue_failed(step)
        decoding = any(r.computed >= r.prefill_until for r in self.queues.running)
        most = self.limits.budget(decoding)
        if self.step_limit:
            most = min(most, len(self.queues.running) + self.step_limit)
        budget = self._continue_running(step, most)
        if not step.preempted:
            budget = self._admit(step, budget)
        step.tokens = most - budget
        if self.limits.arena_rows:  # whole spans may have taken more than the budget
            step.tokens = sum(chunk.count for chunk in step.chunks)
        if self.speculation is not None and any(chunk.drafts for chunk in step.chunks):
            step.drafts = [chunk.drafts for chunk in step.chunks if chunk.samples]
        if self.speculation is not None and self.speculation.pace is not None:
            requests = [chunk.request for chunk in step.chunks]
            step.head = self.speculation.pace.runs(requests, step.admitted)
            step.guesses = self.speculation.head_guesses
            step.least = self.speculation.pace.least(len(requests)) if step.head else None
        if self.blocks.stateful:
            step.restores, step.saves = self.blocks.take_copies()
        if step.chunks:
            self._in_flight.append(step)
        return step

    def _waits_for_drafts(self) -> bool:
        speculation = self.speculation
        if speculation is None or not speculation.waits:
            return False
        return any(step.drafts for step in self._in_flight)

    def _may_decode(self, request: Request) -> bool:
        """Its last token is known or on the device, it is not the last of its answer, and nothing depends on it."""
        if request.computed < request.prefill_until or request.total >= request.end:
            return False
        if self.speculation is not None and self.speculation.must_land(request):
            return False
        return request.constraint is None or not request.pending

    def _continue_running(self, step: Step, budget: int) -> int:
        """Schedule a chunk for each running request; returns the remaining budget."""
        page_size, speculation = self.limits.page_size, self.speculation
        running = self.queues.running
        reserved = 0  # tokens of those that decode and come after the prompts
        if speculation is not None or any(r.computed < r.prefill_until for r in running):
            decoding = [request for request in running if self._may_decode(request)]
            reserved = len(decoding)
            if speculation is not None:
                speculation.plan(decoding, self.limits.drafts)
        chunks, sampling = step.chunks, step.sampling
        positions = 0  # by the tokens that are decoded
        for request in running:  # may lose its last ones while the loop runs
            if budget == 0:
                break
            if request.computed < request.prefill_until:
                if budget <= reserved:
                    continue
                pages = NO_PAGES if request.loading is None else self._arrived(request, step)
                if pages is not None:
                    budget -= self._prefill(request, pages, budget - reserved, step)
                continue
            total = request.total
            if total >= request.end:
                continue  # its last token is in flight
            if request.constraint is not None and request.pending:
                continue  # what may follow the token in flight is not known
            if speculation is not None:
                if not speculation.must_land(request):
                    reserved -= 1
                    budget -= self._verify(request, speculation, budget, step)
                continue
            reserved -= 1
            first_page, pages = len(request.blocks), NO_PAGES
            if total > first_page * page_size:
                pages = self._grow(request, total, step)
                if pages is None:
                    continue
            chunks.append(Chunk(request, total - 1, 1, first_page, pages, 1))
            sampling.append(request)
            request.computed = total
            request.total = total + 1
            positions += total
            budget -= 1
        step.read += positions
        step.pairs += positions
        return budget

    def _admit(self, step: Step, budget: int) -> int:
        """Give rows to the head of the line while everything it needs is there."""
        queues = self.queues
        while budget and queues.free_rows and queues.waiting:
            request = queues.waiting.head
            if request.pending:
                break  # preempted in flight: its last token is on the way, and cannot be computed before
            pages = self.blocks.allocate(request, request.total)
            if pages is None and self.limits.pages_for(request) > self.limits.pages - 1:
                self._fail_outgrown(request, step)  # what it has decoded leaves its prompt no room
                continue
            if pages is None:
                break
            queues.admit()
            request.prefill_until = request.total
            if self.tiers is not None:
                self.tiers.begin(request)
                if request.loading is not None:
                    request.loading.told = not self._waits(request, request.loading)
                    if not request.loading.told:
                        continue
            step.admitted.append(request)
            budget -= self._prefill(request, pages, budget, step)
        return budget

    # -- pages that come from a tier ------------------------------------------------------------------

    def _waits(self, request: Request, loading: Loading) -> bool:
        """Nothing is left to compute before its pages are here."""
        return request.computed >= loading.first * self.limits.page_size

    def _arrived(self, request: Request, step: Step) -> Sequence[int] | None:
        """Go on behind the pages that were loaded; what its row has to be told. None: they are still on their way."""
        loading = request.loading
        if loading is None or not self._waits(request, loading):
            return NO_PAGES
        if loading.state != "landed":
            return None
        request.loading, size = None, self.limits.page_size
        request.computed = loading.last * size
        if request.ledger.preemptions == 0:
            loaded = (loading.last - loading.first) * size
            request.cached = min(request.cached + loaded, len(request.prompt))
        self.blocks.publish(request, request.computed)
        if loading.told:
            return NO_PAGES
        step.admitted.append(request)
        return self.blocks.entries(request, 0, len(request.blocks))

    def _requeue_failed(self, step: Step) -> None:
        """Requeue requests whose blocks could not be loaded; they look up the prefix cache again."""
        running = self.queues.running
        for request in [
            r for r in running if r.loading is not None and r.loading.state == "failed"
        ]:
            step.preempted.append(self.queues.preempt(request))

    def _prefill(self, request: Request, pages: Sequence[int], budget: int, step: Step) -> int:
        """The next part of what was known at admission; returns how many tokens it has."""
        start, total = request.computed, request.prefill_until
        count = min(total - start, budget, self.limits.prefill_chunk or budget)
        if request.loading is not None:  # from there on its pages are loaded
            count = min(count, request.loading.first * self.limits.page_size - start)
        end, first_page = start + count, 0 if pages else len(request.blocks)
        if request.pieces:
            end = whole_end(request, start, end)
        if self.blocks.stateful:
            end = self.blocks.cut(request, start, end)
        if self.blocks.windowed:
            prepared = self._prepare(request, end, step)
            if prepared is None:
                return 0
            end, first_page, pages = prepared
        count, request.computed = end - start, end
        step.chunks.append(Chunk(request, start, count, first_page, pages, int(end == total)))
        if end == total:
            step.sampling.append(request)
            request.total = total + 1
            if self.speculation is not None:
                self.speculation.launch(request, 0)
        request.ledger.prefill_chunks += 1
        step.prefill += count
        step.read += end
        step.pairs += count * start + count * (count + 1) // 2
        filled = self.blocks.publish(request, end)
        if self.blocks.stateful:
            filled += self.blocks.save_state(request, end)
        if filled:
            step.filled.append((request, filled))
        return min(count, budget)

    def _verify(self, request: Request, speculation: Speculation, budget: int, step: Step) -> int:
        """A decoding request's last token and the drafts behind it; returns how many tokens that is."""
        if request.drafted and len(request.outputs) < request.min_tokens:
            return 0  # whether the next token may end the answer depends on how many drafts hold
        total, drafts = request.total, NO_TOKENS
        guesses, drafted, _ = speculation.planned(request)
        if drafted:
            # What is left when those that run behind it have a token each.
            spare = budget - max(len(self.queues.running) - len(step.chunks), 1)
            drafts = guesses[: max(min(drafted, spare, request.end - total - 1), 0)]
        first_page, pages = len(request.blocks), NO_PAGES
        room = first_page * self.limits.page_size
        if drafts and total + len(drafts) > room:
            pages = self.blocks.allocate(request, total + len(drafts))
            if pages is None:  # no request loses pages for drafts
                drafts, pages = drafts[: max(room - total, 0)], NO_PAGES
        if not pages and total > room:
            pages = self._grow(request, total, step)
            if pages is None:
                return 0
        count = 1 + len(drafts)
        step.chunks.append(
            Chunk(request, total - 1, count, first_page, pages, count, drafts, request.drafted > 0)
        )
        step.sampling.append(request)
        speculation.launch(request, count - 1, guesses)
        request.computed = total - 1 + count
        request.total = total + count
        step.read += request.computed
        step.pairs += count * (total - 1) + count * (count + 1) // 2
        return count

    def _prepare(
        self, request: Request, end: int, step: Step
    ) -> tuple[int, int, Sequence[int]] | None:
        """End of the next chunk, and the blocks that its window groups add to the tables.

        None: there was not one page, and the request was the last of the running.
        """
        admitted = request in step.admitted
        while True:
            ready, first, added = self.blocks.prepare(request, end)
            if request.pieces and ready < end:  # pages for the rest of a span may be missing
                whole = whole_end(request, request.computed, ready)
                ready = whole if whole <= ready else request.computed
            if ready > request.computed:
                break
            self._preempt_last(step)
            if request.state != "running":
                if admitted:  # no runner may look for its row
                    step.admitted.remove(request)
                return None
        if admitted:
            return ready, 0, self.blocks.entries(request, 0, len(request.blocks))
        return ready, first if added else len(request.blocks), added

    def _grow(self, request: Request, upto: int, step: Step) -> list[int] | None:
        """Pages for a running request, taken from the last of the running if there are none.

        None: the request itself was the last, and has to wait or to end.
        """
        while (pages := self.blocks.allocate(request, upto)) is None:
            victim = self.queues.running[
                -1
            ]  # not in this step yet: the step is filled in the same order
            if victim is not request or len(self.queues.running) > 1:
                self._preempt_last(step)
            elif request.pending == 0:
                self._fail_outgrown(request, step)
            # Alone with a token in flight: that token may be its last one.
            if victim is request:
                return None
        return pages

    def _preempt_last(self, step: Step) -> None:
        step.preempted.append(self.queues.preempt())

    def _fail_outgrown(self, request: Request, step: Step) -> None:
        pages = self.limits.pages - 1
        error = (
            f"{len(request.prompt)} prompt tokens and {len(request.outputs)} outputs fill all {pages} "
            f"pages of {self.limits.page_size} tokens that the cache has"
        )
        self._fail(request, error, step)

    def _fail(self, request: Request, error: str, step: Step) -> None:
        """End a request that cannot go on; `update` reports it with the step."""
        request.error = error
        self.queues.finish(request, "error")
        self.queues.sweep()
        step.failed.append(request)

    # -- what a step brought ---------------------------------------------------------------------

    def update(self, step: Step, drawn: Sequence[int]) -> list[Advance]:
        """Take in a token for each of `step.sampling`, and one for each of their drafts; steps come in order."""
        self._land(step, len(drawn))
        advances = [Advance(request, NO_TOKENS, True) for request in step.failed]
        ended = False
        pairs = zip(step.sampling, drawn, strict=True)
        if self.speculation is not None:
            pairs = self.speculation.land(step, drawn)
        for request, token in pairs:
            if request.state == "finished":
                continue  # aborted, or stopped before this token
            constraint = request.constraint
            if constraint is not None and (error := constraint.accept(token)) is not None:
                request.error = error
                self.queues.finish(request, "error")
                advances.append(Advance(request, NO_TOKENS, True))
                ended = True
                continue
            outputs = request.outputs
            outputs.append(token)
            count = len(outputs)
            if count >= request.publish_at and request.state == "running":
                self.blocks.publish(request, len(request.prompt) + count - 1)
            finished = False
            if token in request.stop_ids and count >= request.min_tokens:
                is_eos = token in request.eos_ids and not request.params.ignore_eos
                self.queues.finish(request, "stop", None if is_eos else token)
                ended = finished = True
            elif constraint is not None and constraint.finished:  # at an end that is not ours
                self.queues.finish(request, "stop")
                ended = finished = True
            elif count >= request.most_outputs:
                self.queues.finish(request, "length")
                ended = finished = True
            advances.append(Advance(request, (token,), finished))
        if ended:
            self.queues.sweep()
        return joined(advances) if step.drafts else advances

    def fail(self, step: Step, error: str) -> list[Advance]:
        """The step did not run: end its requests, and those that built upon what it should have written."""
        self._in_flight.remove(step)
        lost, unwritten = self._consequences(step)
        self.blocks.forget(sorted(unwritten))
        for request in [r for r in self.queues.running if r.loading is not None and r not in lost]:
            pages = (page for table in (request.blocks, *request.more_blocks) for page in table)
            if not unwritten.isdisjoint(pages):
                self.queues.preempt(request)  # it has computed nothing on them yet: it looks again
        ended = [request for request in lost if request.state != "finished"]
        for request in ended:
            request.error = error
            self.queues.finish(request, "error")
        self.queues.sweep()
        return [Advance(request, NO_TOKENS, True) for request in (*step.failed, *ended)]

    def _consequences(self, step: Step) -> tuple[dict[Request, None], set[int]]:
        """Requests that used data which a failed step did not write, and the cached blocks with such data."""
        lost = {chunk.request: None for chunk in step.chunks}
        unwritten = {page for _, pages in step.filled for page in pages}
        tables = self.limits.page_tables
        for later in self._in_flight:
            if later.number < step.number:
                continue
            filled = dict(later.filled)
            for chunk in later.chunks:  # who finds a page comes after the one that fills it
                shared = chunk.start // self.limits.page_size if chunk.first_page == 0 else 0
                shared *= tables
                if chunk.request in lost or not unwritten.isdisjoint(chunk.pages[:shared]):
                    lost[chunk.request] = None
                    unwritten.update(filled.get(chunk.request, ()))
        return lost, unwritten

    def _land(self, step: Step, drawn: int) -> None:
        draws = step.draws if step.drafts else len(step.sampling)
        if draws != drawn:
            raise ValueError(f"step {step.number} samples {draws} tokens, not {drawn}")
        if not step.chunks:
            return
        if not self._in_flight or self._in_flight[0] is not step:
            expected = self._in_flight[0].number if self._in_flight else "none"
            raise ValueError(f"step {step.number} was updated, the next in flight is {expected}")
        self._in_flight.popleft()
