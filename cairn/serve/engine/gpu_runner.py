"""The runner on a GPU: fused kernels, and CUDA graphs of whole steps.

A step replays the graph of the next shape above its own; the rest is padding, which writes nothing and is never
attended to. Graphs hold everything from the inputs to the sampled token. A step that has no graph runs kernel by
kernel.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from cairn.core.errors import ConfigError
from cairn.core.events import instant
from cairn.kernels.paged.cascade import parts_of, split_tables
from cairn.kernels.paged.paged_parts import lasting_workspace
from cairn.models.cache import layer_planes
from cairn.models.fused import Fused
from cairn.models.fused_head import FusedHead
from cairn.models.fused_mtp import FusedMtp
from cairn.models.linear.form import Fp8Form
from cairn.models.linear.maps import linears
from cairn.models.mtp import DraftHead, MtpHead
from cairn.models.transformer import Transformer
from cairn.serve.engine.adapter_slots import AdapterSlots, bucket_of
from cairn.serve.engine.adapters import VARIES
from cairn.serve.engine.batch import Staged
from cairn.serve.engine.cache_scales import CacheScales
from cairn.serve.engine.cuda_graph import Graphs, Shape, shared_sizes
from cairn.serve.engine.eager_steps import draw_special, large_shapes
from cairn.serve.engine.gpu_pages import Extent, PagedOnGPU
from cairn.serve.engine.pages import Paged
from cairn.serve.engine.request import Limits
from cairn.serve.engine.runner import Forward, Runner
from cairn.serve.engine.shared_prefix import SharedPrefix
from cairn.serve.engine.sleep_memory import GpuMemory
from cairn.serve.engine.spans import Reach, reaches_of
from cairn.serve.engine.step import Chunk, Step
from cairn.serve.engine.step_budget import mixed_step_tokens
from cairn.serve.engine.two_batch_overlap import TwoBatchOverlap, suits

# What the host needs to launch a layer kernel by kernel, and what experts add to that (beside an H200).
LAYER_S, EXPERTS_S = 0.0013, 0.0015
WIDEST_TILE = 64  # rows of queries that one program of the decode kernel holds

Forms = tuple[Fused | None, TwoBatchOverlap | None]  # that a step may run in


def launch_s(model: Transformer) -> float:
    """Device time of a step that hides the host's launch of the next one.

    In the time of products in 16 bits: in 8 bits twice as many tokens are done by then.
    """
    spec = model.spec
    layers = (spec.experts_of(layer) is not None for layer in range(spec.layers))
    seconds = sum(LAYER_S + EXPERTS_S * experts for experts in layers)
    float8 = any(isinstance(part.form, Fp8Form) for part in linears(model))
    return 2 * seconds if float8 else seconds


class GPURunner(Runner):
    def __init__(
        self,
        model: Transformer,
        limits: Limits,
        dtype: torch.dtype | None = None,
        graphs: bool = True,
        fused: bool = True,
        invariant: bool = False,
        scales: CacheScales | None = None,
        head: DraftHead | None = None,
        memory: GpuMemory | None = None,
    ) -> None:
        """`memory`: where weights lie and pages will, if the model may sleep."""
        with memory.pages() if memory is not None else nullcontext():
            pool = self.make_pool(model, limits, dtype, scales)
        super().__init__(model, limits, dtype, scales=scales, head=head, pool=pool)
        self.memory = memory
        self.invariant = invariant
        if invariant:
            self.adapters.obstacle = VARIES
        elif model.build.shards.size == 1:
            self.adapters.slots = AdapterSlots(model, limits)
        self._layouts = 0  # of steps with adapters, when their graphs were captured
        self.fused = Fused(model, limits.context, invariant) if fused else None
        if self.head is not None and head is not None and self.fused is not None:
            longest = limits.context + limits.drafts  # a guess may stand behind the last token
            if isinstance(head, MtpHead):
                head.scores = self.fused.logits
                self.head.form = FusedMtp(head, longest, 2 * limits.rows, invariant)
            else:
                self.head.form = FusedHead(head, longest, 2 * limits.rows, invariant)
        why_not = "plain takes cuBLAS" if self.fused is None else self.fused.varies()
        if invariant and why_not:
            raise ConfigError(
                f"batch_invariant is not to be had on a GPU for this model: {why_not}",
                hint="run it on a CPU, or without batch_invariant",
            )
        if model.spec.is_recurrent and invariant:
            raise ConfigError(
                f"batch_invariant is not to be had on a GPU for layers with a state ({model.spec.family})",
                hint="run it on a CPU, or without batch_invariant",
            )
        # Without kernels a layer with a state asks the host for its slots, which no graph can.
        graphs = graphs and all(getattr(part, "has_kernels", True) for part in model.modules())
        keys = layer_planes(model.spec, model.spec.token_layers[0])[0]
        group = model.spec.heads // keys.heads
        rows = max(16, min(WIDEST_TILE, 1 << (8 * group - 1).bit_length()))
        columns = 1 << (keys.width - 1).bit_length()
        if model.spec.latent:  # its kernel has parts of its own
            rows, columns = 16, 16
        self.workspace = lasting_workspace(self.device, rows, columns)
        spec = model.spec
        largest = mixed_step_tokens(
            spec,
            model.embedding.weight,
            model.build.shards.size,
            1e3 * launch_s(model),
            limits.rows,
            limits.step_tokens,
        )
        self.graphs = None
        if graphs:
            together = model.build.shards.size > 1
            self.graphs = Graphs(limits, self._blank, self._step, largest, self._warm, together)
        self.halves = None
        whole = head is not None or spec.is_recurrent
        if self.fused is not None and not whole and suits(spec, self.fused):
            other = lasting_workspace(self.device, rows, columns)
            self.halves = TwoBatchOverlap(
                self.fused, (self.workspace, other), self.pool.scales is not None
            )
        self._first_layers: Forms | None = None  # of both, for `_warm`
        self._all_layers_ran = False
        if self.fused is not None and not whole:
            halves = self.halves.warming() if self.halves is not None else None
            self._first_layers = self.fused.warming(), halves
        self.shared = SharedPrefix(limits.page_size, keys.heads * keys.width)
        # Of several tables, only that of the first group is compared and split.
        kinds = [group.kind for group in limits.groups]
        self.can_share = kinds.count("full") == 1 and kinds[0] == "full" and not invariant
        self.can_share = self.can_share and not spec.latent and not spec.is_recurrent

    def check_sleep(self, level: int) -> None:
        if self.memory is None:
            raise ConfigError(
                "this engine cannot sleep: its memory was not prepared for it",
                hint="start it with enable_sleep_mode (--enable-sleep-mode)",
            )
        if level > 1:
            raise ConfigError(
                f"level is {level}, and on a GPU weights that sleep are kept in the host's memory",
                hint="use level 1",
            )

    def sleep(self, level: int) -> None:
        self.check_sleep(level)
        if self.memory is not None:
            self.memory.sleep()

    def wake(self) -> None:
        if self.memory is not None:
            self.memory.wake()

    def warm_up(self) -> None:
        """Capture the graphs of all common steps and launch once what runs without one, before requests come."""
        with torch.inference_mode():
            if self.graphs is not None:
                self.graphs.capture_common()
            self.warm_eager()
        self.adapters.warm_up()

    def warm_eager(self) -> None:
        """Steps whose states lie where only the host knows cannot be tried without sequences."""
        shapes = [] if self.model.spec.is_recurrent else large_shapes(self.limits)
        try:
            for shape in shapes:
                self._blank(shape)
                self._warm(shape)
                torch.cuda.synchronize()  # the next is staged in memory that this one is still copied from
            draw_special(self.sampler, self.model.embedding.weight.dtype, self.limits.rows)
            torch.cuda.synchronize()
        except torch.OutOfMemoryError as problem:  # the first step that needs it waits for it
            if self.model.build.shards.size > 1:  # other ranks wait for this one's collectives
                raise
            instant("no warm-up", why=str(problem).splitlines()[0])

    def _run(self, step: Step) -> tuple[Staged, Forward]:
        if self.pool.scales is not None and not self.pool.scales.is_known:
            return self._run_first(step, self.pool.scales)
        shared = self._shared_tokens(step)
        found = reaches_of(step.chunks) if self.limits.arena_rows else ()
        reaches = [reach.narrowed() for reach in found]
        shape = None if reaches else self._captured(step, shared > 0)
        self._stage_adapters(step.chunks, shape)
        self._stage_states(step.chunks)
        if self.graphs is None or shape is None:
            staged = self.batch.stage(step.chunks, shared=shared)
            return staged, self.forward(staged, step.chunks, shared > 0, reaches)
        staged = self.batch.stage(step.chunks, shape.layout, shared)
        return staged, self.graphs.replay(shape)

    def _captured(self, step: Step, shared: bool) -> Shape | None:
        """The shape whose graph can run this step. Graphs with adapters know slots, not adapters."""
        adapters = self.adapters
        if self.graphs is None or not adapters.active:
            return None if self.graphs is None else self.graphs.ready(step.chunks, shared)
        slots, numbers = adapters.slots, {chunk.request.adapter for chunk in step.chunks} - {0}
        most = bucket_of(len(numbers)) if slots is not None and adapters.in_slots else None
        if slots is None or most is None:
            return None
        if slots.layouts != self._layouts:
            self.graphs.forget_adapters()
            self._layouts = slots.layouts
        return self.graphs.ready(step.chunks, shared, most)

    def _stage_adapters(self, chunks: Sequence[Chunk], shape: Shape | None) -> None:
        if not self.adapters.in_slots or self.adapters.slots is None:
            return
        if shape is None:
            self.adapters.slots.stage(chunks)
        else:
            self.adapters.slots.stage(chunks, shape.layout.tokens, shape.adapters)

    def _stage_states(self, chunks: Sequence[Chunk]) -> None:
        if self.pool.states is not None:
            self.pool.states.stage(chunks)

    def _run_first(self, step: Step, scales: CacheScales) -> tuple[Staged, Forward]:
        """The first prompts, kernel by kernel: each layer sets the scales of its cache before it stores anything."""
        self._stage_adapters(step.chunks, None)
        self._stage_states(step.chunks)
        staged = self.batch.stage(step.chunks)
        most = max(chunk.count for chunk in step.chunks)
        fresh = most > 1 and all(chunk.start == 0 for chunk in step.chunks)
        done = self._forward(staged, Extent(most, fresh, self.invariant, measures=True))
        scales.is_known = True
        return staged, done

    def _shared_tokens(self, step: Step) -> int:
        verifies = self.limits.drafts and (step.drafts or any(c.ahead for c in step.chunks))
        if step.prefill or step.admitted or verifies:
            self.shared.forget()
            may = self.can_share and not verifies and step.tokens <= shared_sizes(self.limits)[-1]
            return self.shared.before(step.chunks) if may else 0
        return self.shared.tokens(step.sampling) if self.can_share else 0

    def run_blank(self, shape: Shape) -> Forward:
        """A step of this shape that is all padding: kernel by kernel, without a graph."""
        self._blank(shape)
        return self._step(shape)

    def _blank(self, shape: Shape) -> None:
        self.batch.stage([], shape.layout)
        self._stage_states([])
        if shape.adapters:
            self._stage_adapters([], shape)

    def _step(self, shape: Shape, forms: Forms | None = None) -> Forward:
        """Whatever lies where the words of such a step lie."""
        extent = Extent(shape.layout.max_query, shape.fresh, self.invariant, shape.shared)
        return self._forward(self.batch.views(shape.layout), extent, forms=forms)

    def _warm(self, shape: Shape) -> None:
        """Launch every kernel of such a step. Adapters may differ from layer to layer, other weights do not.

        The first time all layers run: a weight's form may lay its rows out anew in its first product, and inside a
        capture that would be done again in every replay, in memory that other graphs use, too.
        """
        whole = shape.adapters or not self._all_layers_ran
        self._step(shape, None if whole else self._first_layers)
        self._all_layers_ran = True

    def scores(self, hidden_TD: Tensor) -> Tensor:
        return (self.fused or self.model).logits(hidden_TD)

    def attend_rows(
        self, slots_GB: Tensor, positions_B: Tensor, lengths_B: Tensor, tables_GBP: Tensor
    ) -> Paged:
        return PagedOnGPU(
            self.pool,
            slots_GB,
            positions_B,
            lengths_B,
            tables_GBP,
            None,
            Extent(1),
            self.workspace,
        )

    def forward(
        self,
        staged: Staged,
        chunks: Sequence[Chunk],
        shared: bool = False,
        reaches: Sequence[Reach] = (),
    ) -> Forward:
        """`reaches`: sequences whose attention needs the pages."""
        most = max(chunk.count for chunk in chunks)
        fresh = most > 1 and all(chunk.start == 0 for chunk in chunks) and not reaches
        return self._forward(staged, Extent(most, fresh, self.invariant, shared), reaches)

    def _forward(
        self,
        staged: Staged,
        extent: Extent,
        reaches: Sequence[Reach] = (),
        forms: Forms | None = None,
    ) -> Forward:
        fused, halves = forms or (self.fused, self.halves)
        inputs = self.batch.make_inputs(staged)
        one_each = extent.max_query == 1 and not self.invariant and not staged.verifies
        bounds = None if one_each else staged.decided.bounds_B1
        cascade = None
        if extent.shared:
            tables_BP, spec = inputs.tables_GBP[0], self.model.spec
            keys = layer_planes(spec, spec.token_layers[0])[0]
            queries, size = len(inputs.tokens_T), self.limits.page_size
            parts = parts_of(queries, spec.heads, keys.heads)
            cascade = split_tables(
                tables_BP, inputs.lengths_B, staged.shared_1, size, parts, queries
            )
        attend = PagedOnGPU(
            self.pool,
            inputs.slots_GT,
            inputs.positions_T,
            inputs.lengths_B,
            inputs.tables_GBP,
            bounds,
            extent,
            self.workspace,
            cascade,
        )
        attend.reaches = reaches
        if staged.offsets_3T is not None:
            attend.axes_3T = inputs.positions_T + staged.offsets_3T
        model = fused or self.model
        rows = len(inputs.tokens_T)
        in_halves = (
            one_each and cascade is None and not self.adapters.active
        )  # which rows are whose
        if in_halves and halves is not None and halves.worth(rows):
            return self.compute(halves, model.logits, inputs, attend, staged)
        return self.compute(model, model.logits, inputs, attend, staged)
