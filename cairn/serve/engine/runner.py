"""Carries out the steps that the scheduler decides, on one device, without waiting for it.

    step -batch-> tokens, positions, slots -model-> hidden -> logits of the last tokens -sampler-> next tokens -> host

`launch` returns at once with a `Flight`; its `land` waits for the sampled tokens. On a GPU the tokens stay there for
the next step as well, so a second step can be launched before the first has landed. A step in which every sequence
decodes one token replays a CUDA graph; others run kernel by kernel. On a CPU the same code runs torch's operations,
and a flight has landed when it is launched. The runner knows no queue and frees no page.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.kernels.paged.step_inputs import Inputs, keep_tokens
from cairn.kernels.sampling.accept_tokens import Drawn, accept_tokens
from cairn.kernels.sampling.logprobs import LogProbs, views_of
from cairn.models.cache import ONE_GROUP, CacheGroup, cache_groups
from cairn.models.eagle import EagleHead
from cairn.models.lean_head import LeanHead, obstacle
from cairn.models.linear.maps import linears
from cairn.models.linear.transposed import TransposedForm
from cairn.models.mtp import DraftHead
from cairn.models.transformer import Transformer
from cairn.serve.engine.adapters import Adapters
from cairn.serve.engine.batch import Batch, Staged
from cairn.serve.engine.cache_scales import CacheScales
from cairn.serve.engine.compiled_layers import CompiledLayers
from cairn.serve.engine.cpu_threads import few_tokens, one_thread
from cairn.serve.engine.pages import Paged, PagePool
from cairn.serve.engine.pooling import Part, part_of
from cairn.serve.engine.recorded_step import serving_form
from cairn.serve.engine.request import Limits, Request, special
from cairn.serve.engine.sampler import Sampler
from cairn.serve.engine.spans import reaches_of
from cairn.serve.engine.speculate.head_drafts import HeadDrafts
from cairn.serve.engine.state_slots import StateSlots
from cairn.serve.engine.step import Chunk, Step, begun_pages
from cairn.serve.engine.token_logprobs import (
    PromptLogprobs,
    PromptRows,
    TokenLogprobs,
    on_host,
    prompt_rows,
    shortened,
)
from cairn.serve.engine.weight_sources import WeightsFrom
from cairn.serve.engine.weights_in_place import check_source, drop_weights, replace_weights

PROMPT_ROWS = 1024  # rows of logits at a time, for the log-probabilities of a prompt


class Landed(NamedTuple):
    tokens: list[
        int
    ]  # drawn for each sampling chunk, in order: one, and one for each of its drafts
    logprobs: dict[Request, list[TokenLogprobs]]  # of requests that asked, for all that was drawn
    prompt_logprobs: dict[Request, PromptLogprobs]
    pooled: dict[Request, Part] = {}  # noqa: RUF012  of requests that want a vector of their prompt
    drafts: list[Sequence[int]] | None = None  # as `Step.drafts`, where the device has made some


class Forward(NamedTuple):
    """Device results of a forward pass."""

    hidden_TD: Tensor
    logits_SV: Tensor
    position_S: Tensor  # where the sampled tokens will stand
    tokens_S: Tensor


class Runner:
    """Execution of steps on one device."""

    def __init__(
        self,
        model: Transformer,
        limits: Limits,
        dtype: torch.dtype | None = None,
        lean: bool = False,
        scales: CacheScales | None = None,
        head: DraftHead | None = None,
        pool: PagePool | None = None,
    ) -> None:
        """`dtype`: of the cache, with `scales` if that is float8; by default the model's. `head`: drafts.

        `lean`: on a CPU, through fewer operations; see `models.lean` and `engine.recorded_step`.
        """
        weight = model.embedding.weight
        self.model, self.limits, self.device = model, limits, weight.device
        self.pool = pool or self.make_pool(model, limits, dtype, scales)
        self.source: WeightsFrom | None = None  # of the weights, if they can be read again
        self.version = 0
        self._slept: int | None = None  # the level of its sleep
        self.batch = Batch(limits, self.device)
        self.head = HeadDrafts(head, model, limits) if head is not None else None
        self.batch.made_NK = self.head.drafts_NK if self.head is not None else None
        self.head_runs = True  # behind this step
        self.sampler = Sampler(limits.rows, model.spec.vocab, self.device)
        if limits.arena_rows:
            width = model.spec.hidden * (1 + model.spec.deep_rows)
            model.arena_RD = weight.new_zeros(limits.arena_rows, width)
        self._lean = lean
        self.lean = serving_form(model, self.pool) if lean else None
        self._compile_head()
        self.adapters = Adapters(model)
        self._few_tokens = _few_tokens(model)
        self.alter_draws: Callable[[Drawn], None] | None = None  # of steps that verify, for benches

    def _compile_head(self) -> None:
        """All passes of a head in one call, where it has that form. It reads the embeddings as they are now."""
        if self.head is not None and self._lean and isinstance(self.head.form, EagleHead):
            parts = self.head.form, self.head.embedding
            self.head.compiled = None if obstacle(*parts) else LeanHead(*parts)

    def warm_up(self) -> None:
        """Prepare in advance what the first steps would; on a CPU there is nothing."""

    @staticmethod
    def make_pool(
        model: Transformer, limits: Limits, dtype: torch.dtype | None, scales: CacheScales | None
    ) -> PagePool:
        weight, groups = model.embedding.weight, pool_groups(model, limits)
        pool = PagePool(
            groups, limits.pages, limits.page_size, dtype or weight.dtype, weight.device, scales
        )
        if limits.states:
            state_groups = [group for group in groups if group.kind == "state"]
            pool.states = StateSlots(
                state_groups,
                limits.states,
                limits.pages,
                weight.dtype,
                weight.device,
                2 * limits.rows,
            )
        return pool

    def check_sleep(self, level: int) -> None:
        """A CairnError: it cannot sleep at this level. Changes nothing."""
        if level >= 2:
            check_source(self.model, self.source)

    def sleep(self, level: int) -> None:
        """Give the memory of the pages back, and at level 2 that of the weights; behind `check_sleep`."""
        if level >= 2:
            self.adapters.drop_forms()
            drop_weights(self.model)
        self.pool.release()
        self.lean, self._slept = None, level
        if self.head is not None:
            self.head.compiled = None

    def wake(self) -> None:
        """Restore the weights after `sleep`, reading them again if they were dropped; the cache is empty."""
        if self._slept is None:
            return
        if self._slept >= 2 and self.source is not None:
            replace_weights(self.model, self.version, self.source)
            self.adapters.forget_forms()
        pool = self.pool
        self.pool = self.make_pool(self.model, self.limits, pool.cache.dtype, pool.scales)
        self._slept = None
        self.lean = serving_form(self.model, self.pool) if self._lean else None
        self._compile_head()

    def pages_moved(self) -> None:
        """The pool has gone on in other memory: compiled steps keep its addresses, and are made again."""
        if isinstance(self.lean, CompiledLayers):
            self.lean = CompiledLayers(self.lean.lean, self.pool)

    def write_piece(self, first_row: int, embeddings_RD: Tensor) -> None:
        """Put the embeddings of a piece into rows of the arena that it holds."""
        arena_RD = self.model.arena_RD
        if arena_RD is None:
            raise ValueError("this engine has no arena; give `arena_rows` when it is started")
        arena_RD[first_row : first_row + len(embeddings_RD)] = embeddings_RD

    def load_weights(self, version: int, source: WeightsFrom) -> None:
        """Replace the weights, and make again what was made of them. A CairnError: nothing has changed."""
        replace_weights(self.model, version, source)
        self.source, self.version = source, version
        self.adapters.forget_forms()
        if self.lean is not None:
            self.lean = serving_form(self.model, self.pool)
        self._compile_head()

    @torch.inference_mode()
    def launch(self, step: Step) -> "Flight":
        for request in step.admitted:
            self.sampler.admit(request)
            self.batch.admit(request)
        self.sampler.flush()
        self.head_runs = step.head
        if self.head is not None:
            self.head.least = step.least
        states = self.pool.states
        if states is not None:
            states.begin(step)
        threads = one_thread() if step.tokens <= self._few_tokens else nullcontext()
        with threads, self.adapters.routed(step.chunks):
            staged, done = self._run(step)
        if states is not None:
            states.end(step)
        if any(map(special, step.sampling)):
            done = done._replace(tokens_S=self._sample_special(step, staged, done))
        return self._flight(step, done)

    def _run(self, step: Step) -> tuple[Staged, Forward]:
        staged = self.batch.stage(step.chunks)
        self.pool.blank(begun_pages(step.chunks, self.limits))
        return staged, self.forward(staged, step.chunks)

    def forward(self, staged: Staged, chunks: Sequence[Chunk]) -> Forward:
        inputs = self.batch.make_inputs(staged)
        one_each = all(chunk.count == 1 for chunk in chunks) and not staged.verifies
        bounds = None if one_each else staged.decided.bounds_B1
        attend = Paged(
            self.pool,
            inputs.slots_GT,
            inputs.positions_T,
            inputs.lengths_B,
            inputs.tables_GBP,
            bounds,
        )
        if self.limits.arena_rows:
            attend.reaches = reaches_of(chunks)
        if staged.offsets_3T is not None and bool(staged.offsets_3T.any()):
            attend.axes_3T = inputs.positions_T + staged.offsets_3T
        model = self.model if self.lean is None else self.lean
        if self.adapters.active and self.lean is not None:
            model = self.adapters.lean()
        return self.compute(model, self.model.logits, inputs, attend, staged)

    def compute(
        self,
        model: Callable[[Tensor, Tensor, Paged], Tensor],
        logits: Callable[[Tensor], Tensor],
        inputs: Inputs,
        attend: Paged,
        staged: Staged,
    ) -> Forward:
        """Everything between a step's inputs and its sampled tokens."""
        head = self.head if self.head_runs else None
        taps = head.taps if head is not None else ()
        hidden_TD, tapped = computed(model, inputs, attend, taps)
        at_S = staged.sample_at_S
        one_each = attend.bounds_B1 is None and len(at_S) == len(hidden_TD)
        all_of_them = staged.each_drawn or one_each
        position_S = inputs.positions_T if all_of_them else inputs.positions_T[at_S]
        logits_SV = logits(hidden_TD if all_of_them else hidden_TD[at_S])
        position_S = position_S + 1
        tokens_S = self.sampler.sample(logits_SV, position_S, staged.sample_rows_S)
        self.keep(staged, tokens_S)
        if head is not None and self.batch.text_NC is not None:
            state, text_NC = self.batch.state, self.batch.text_NC
            tapped = tapped or [hidden_TD]
            head.propose(staged, inputs, tapped, tokens_S, state, text_NC, attend, self.attend_rows)
        return Forward(hidden_TD, logits_SV, position_S, tokens_S)

    def attend_rows(
        self, slots_GB: Tensor, positions_B: Tensor, lengths_B: Tensor, tables_GBP: Tensor
    ) -> Paged:
        """The attention of rows with one token each."""
        return Paged(self.pool, slots_GB, positions_B, lengths_B, tables_GBP, None)

    def keep(self, staged: Staged, tokens_S: Tensor) -> None:
        """Store the inputs of the next step: the last tokens, and the number of accepted drafts of each row."""
        if not staged.verifies:
            keep_tokens(self.batch.state, tokens_S, staged.sample_rows_S)
            return
        decided, inputs = staged.decided, self.batch.inputs_of(staged)
        drawn = Drawn(
            decided.rows_B,
            decided.bounds_B1,
            staged.sample_bounds_B1,
            inputs.tokens_T,
            inputs.positions_T,
            tokens_S,
        )
        if self.alter_draws is not None:
            self.alter_draws(drawn)
        accept_tokens(drawn, self.batch.state)

    def _sample_special(self, step: Step, staged: Staged, done: Forward) -> Tensor:
        """Some drawn again, with what only they ask for; in place of the tokens that were kept."""
        count, tokens_S = step.draws, done.tokens_S.clone()
        self.sampler.sample_special(
            done.logits_SV[:count],
            done.position_S[:count],
            staged.sample_rows_S[:count],
            tokens_S[:count],
            step.sampling,
            step.drafts,
        )
        self.keep(staged, tokens_S)
        return tokens_S

    def _flight(self, step: Step, done: Forward) -> "Flight":
        count = step.draws
        flight = Flight(self._to_host(done.tokens_S[:count]), step)
        if step.drafts_on_device:
            computed_T = self.batch.inputs.tokens_T[: step.tokens]  # the next step overwrites it
            on_host = computed_T.device.type == "cpu"
            flight.tokens_T = computed_T.clone() if on_host else self._to_host(computed_T)
        tops = [r.params.logprobs for r in step.sampling if r.params.logprobs is not None]
        if tops:
            flight.logprobs = self._logprobs(
                done.logits_SV[:count], done.tokens_S[:count], max(tops)
            )
        for prompt in prompt_rows(step.chunks):
            flight.prompts.append((prompt, self._prompt_logprobs(prompt, done.hidden_TD)))
        at = 0
        for chunk in step.chunks:
            if chunk.request.params.pooling is not None:
                part_D = part_of(chunk, done.hidden_TD[at : at + chunk.count])
                flight.pooled.append((chunk, self._to_host(part_D)))
            at += chunk.count
        flight.sent(self.device)
        return flight

    def _prompt_logprobs(self, prompt: PromptRows, hidden_TD: Tensor) -> list[LogProbs]:
        rows_T, next_T = self._to_device(prompt.rows), self._to_device(prompt.following)
        parts = []
        for start in range(0, len(prompt.rows), PROMPT_ROWS):
            part = slice(start, start + PROMPT_ROWS)
            hidden = hidden_TD.index_select(0, rows_T[part])
            scores_TV = self.prompt_scores(hidden, prompt.positions[part])
            parts.append(self._logprobs(scores_TV, next_T[part], prompt.top))
        return parts

    def prompt_scores(self, hidden_TD: Tensor, positions: Sequence[int]) -> Tensor:
        """Logits behind the prompt's tokens at these positions."""
        return self.scores(hidden_TD)

    def scores(self, hidden_TD: Tensor) -> Tensor:
        """Logits of any rows, as the steps of this runner compute them."""
        return self.model.logits(hidden_TD)

    def _logprobs(self, logits_SV: Tensor, tokens_S: Tensor, n: int) -> LogProbs:
        """Log probabilities, copied to the host in one transfer, because each one pauses the device between steps."""
        packed = self._to_host(self.sampler.logprobs(logits_SV, tokens_S, n))
        return views_of(packed, len(tokens_S), n)

    def _to_device(self, numbers: list[int]) -> Tensor:
        """Pinned, since a copy of other memory waits for all that was launched."""
        on_gpu = self.device.type == "cuda"
        host = torch.tensor(numbers, dtype=torch.int32, pin_memory=on_gpu)
        return host.to(self.device, non_blocking=True)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


class Flight:
    """A step under way. What it brings to the host is copied behind it, and read when that has arrived."""

    def __init__(self, tokens_S: Tensor, step: Step) -> None:
        self.tokens_S, self.step = tokens_S, step
        self.logprobs: LogProbs | None = None
        self.prompts: list[tuple[PromptRows, list[LogProbs]]] = []
        self.pooled: list[tuple[Chunk, Tensor]] = []
        # That the step has computed, if the device drafted some.
        self.tokens_T: Tensor | None = None
        self.event: torch.cuda.Event | None = None
        self.launched = 0.0  # a moment of the loop's clock

    def sent(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.event = torch.cuda.Event()
            self.event.record()

    def land(self) -> Landed:
        """Wait, and read."""
        if self.event is not None:
            self.event.synchronize()
        chosen: dict[Request, list[TokenLogprobs]] = {}
        if self.logprobs is not None:
            rows, at = on_host(self.logprobs), 0
            drafts = self.step.drafts or [()] * len(self.step.sampling)
            for request, guessed in zip(self.step.sampling, drafts, strict=True):
                drawn = rows[at : at + 1 + len(guessed)]
                at += len(drawn)
                if (n := request.params.logprobs) is not None:
                    chosen[request] = [shortened(entry, n) for entry in drawn]
        prompts: dict[Request, PromptLogprobs] = {}
        for prompt, parts in self.prompts:
            prompts |= prompt.split([row for part in parts for row in on_host(part)])
        pooled = {
            chunk.request: Part(chunk.start, chunk.samples > 0, part_D.numpy())
            for chunk, part_D in self.pooled
        }
        return Landed(self.tokens_S.tolist(), chosen, prompts, pooled, self._drafts())

    def _drafts(self) -> list[Sequence[int]] | None:
        if self.tokens_T is None:
            return None
        computed, ends = self.tokens_T.tolist(), 0
        drafts: list[Sequence[int]] = []
        for chunk in self.step.chunks:
            ends += chunk.count
            if chunk.samples:
                drafts.append(computed[ends - len(chunk.drafts) : ends])
        return drafts


def computed(
    model: Any, inputs: Inputs, attend: Paged, taps: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """Hidden states behind the last norm, and behind the layers that are tapped."""
    if not taps:
        return model(inputs.tokens_T, inputs.positions_T, attend), []
    return model.tapped(inputs.tokens_T, inputs.positions_T, attend, taps)


def _few_tokens(model: Transformer) -> int:
    """Steps of up to so many tokens run on one thread. Packed products have threads of their own kind."""
    maps = list(linears(model))
    on_cpu = model.embedding.weight.device.type == "cpu"
    if not on_cpu or any(not isinstance(part.form, TransposedForm | None) for part in maps):
        return 0
    return few_tokens([math.prod(part.shape_NK()) for part in maps])


def pool_groups(model: Transformer, limits: Limits) -> tuple[CacheGroup, ...]:
    """The cache groups of the limits, or where those name no layers, one that keeps every token of every layer."""
    if limits.groups != ONE_GROUP:
        return limits.groups
    return cache_groups(model.spec, model.build.shards.size, grouped=False)
