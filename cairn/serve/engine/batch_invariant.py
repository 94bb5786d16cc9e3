"""The same tokens and log-probabilities, bit by bit, whatever else is in the batch: the plain form, in torch.

Sums of floating-point numbers depend on their order, and libraries choose the order by the shape: a product of one row
takes another kernel than one of sixteen, a vector loop ends in scalars, threads cut where the size tells them to. So
here no shape depends on the batch. The model only ever sees ROWS rows, and a token's row is its position modulo ROWS:

    position     0 1 .. 15 | 16 17 .. 31 |      one pass through the model = one group
    row          0 1 .. 15 |  0  1 .. 15 |      of different requests, with empty rows

A token attends to whole blocks of ROWS keys up to its own, and what lies behind it is masked: shapes follow from its
position alone. How a prompt was cut into chunks, what was found in the prefix cache and what was computed again after
a preemption therefore make no difference either. The price: holes are computed as well. Rotations that depend on how
long a sequence is (`dynamic`) are outside of this promise, because a chunk does not know how long its prompt is.

On a GPU the same holds if: every product has a tile shape and a split of K that do not depend on the number of rows
(one kernel for all of them, never skinny for few and cuBLAS for many), decode attention splits a sequence at fixed
places (so many pages for each part) rather than by how many programs are free, prefill reads the pages by the same
kernel as decode, and norms and log-softmax reduce a row within one program.
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from cairn.kernels.paged.step_inputs import Inputs
from cairn.models.attend import AttentionRule
from cairn.models.cpu_half_precision import matmul
from cairn.models.experts import ExpertLayer
from cairn.models.latent import LatentTokens
from cairn.models.layer_loop import ForwardStep, Sublayer
from cairn.models.recurrence import Planes, Recurrence
from cairn.models.transformer import Transformer
from cairn.serve.engine.adapters import VARIES
from cairn.serve.engine.batch import Staged
from cairn.serve.engine.pages import Paged, PagePool, gather
from cairn.serve.engine.request import Limits
from cairn.serve.engine.runner import Forward, Runner
from cairn.serve.engine.state_slots import step_states
from cairn.serve.engine.step import Chunk

ROWS = 16  # every page size is a multiple of it
EMPTY = -1

Group = list[int]  # for each row the token of the step that it holds, or EMPTY


def fixed_groups(chunks: Sequence[Chunk]) -> list[Group]:
    """Each token at the row of its position; no token in an earlier group than one that it attends to."""
    groups: list[Group] = []
    used = [0] * ROWS  # groups before this one have a token in the row, or are skipped
    at = 0
    for chunk in chunks:
        # A request admitted with a prefix may read pages that chunks before it fill in this step.
        shares = chunk.first_page == 0 and chunk.start > 0
        earliest = len(groups) - 1 if shares and groups else 0
        for token in range(chunk.count):
            row = (chunk.start + token) % ROWS
            earliest = max(earliest, used[row])
            used[row] = earliest + 1
            if earliest == len(groups):
                groups.append([EMPTY] * ROWS)
            groups[earliest][row] = at + token
        at += chunk.count
    return groups


class Block:
    """The rows of a group that belong to one block of one sequence."""

    def __init__(self, rows: Sequence[int], block: int, length: int, pages_GP: Tensor) -> None:
        self.rows_R = torch.tensor(rows)
        self.keys = (block + 1) * ROWS
        self.length = length  # of the sequence; what lies behind it in its last page is not its own
        self.pages_GP = pages_GP  # of each cache group
        self.block = block


def visible_keys(block: int, window: int) -> Tensor:
    """Attention mask of a block's rows over all keys up to the block's end."""
    end = (block + 1) * ROWS
    query_G1, key_N = torch.arange(block * ROWS, end)[:, None], torch.arange(end)
    seen_GN = key_N <= query_G1
    return seen_GN & (key_N > query_G1 - window) if window else seen_GN


class FixedPages(Paged):
    """The attention of one group: its shapes depend on positions alone."""

    def __init__(
        self,
        pool: PagePool,
        slots_CG: Tensor,
        positions_G: Tensor,
        lengths_G: Tensor,
        tables_CBP: Tensor,
        blocks: list[Block],
        owners: dict[int, int],
    ) -> None:
        """`owners`: of each row that is not empty, the sequence of the step; rows of one are in its order."""
        super().__init__(pool, slots_CG, positions_G, lengths_G, tables_CBP, None)
        self.blocks, self.owners = blocks, owners

    def __call__(self, q_GHC: Tensor, k_GKC: Tensor, v_GKC: Tensor, rule: AttentionRule) -> Tensor:
        keys, values = self.pool.of_layer(rule.layer)
        self._store(keys, k_GKC, rule)
        self._store(values, v_GKC, rule)
        out_GHC = torch.zeros_like(q_GHC)
        for block in self.blocks:
            pages_P = block.pages_GP[self.pool.group_of[rule.layer]]
            found_GHC = _attend(q_GHC, keys, values, block, pages_P, rule)
            out_GHC[block.rows_R] = found_GHC[block.rows_R]
        return out_GHC

    def latent(self, tokens: LatentTokens, rule: AttentionRule) -> Tensor:
        """Every row in the absorbed form: which form a token takes must not depend on its neighbours."""
        rows_G1E = tokens.rows_TE[:, None]
        return tokens.restored(self(tokens.absorbed(tokens.q_THC), rows_G1E, rows_G1E, rule))

    def recur(self, rule: Recurrence, inputs: Planes) -> Tensor:
        """Token by token and row by row: one step of one state, whatever else there is."""
        if self.pool.states is None:
            raise ValueError(f"layer {rule.layer} keeps a state, and the pool has no slots for any")
        states = self.pool.states
        group, planes = states.of_layer(rule.layer)
        y_by_row: dict[int, Tensor] = {}
        for row, owner in self.owners.items():
            slot_1 = torch.tensor([states.slots[owner][group]])
            y_by_row[row] = step_states(
                rule, tuple(x[row : row + 1] for x in inputs), planes, slot_1
            )
        any_1 = next(iter(y_by_row.values()))
        out = any_1.new_zeros(ROWS, *any_1.shape[1:])
        for row, y_1 in y_by_row.items():
            out[row] = y_1[0]
        return out


def _attend(
    q_GHC: Tensor, keys: Tensor, values: Tensor, block: Block, pages_P: Tensor, rule: AttentionRule
) -> Tensor:
    """All rows against the keys of one sequence; only the block's own rows mean something."""
    k_NKC, v_NKC = (gather(cache, pages_P)[: block.keys] for cache in (keys, values))
    v_NKC[block.length :] = 0  # zero times another's infinity would be felt
    if rule.window:
        v_NKC[: max(0, block.keys - ROWS + 1 - rule.window)] = 0
    return attend_fixed(q_GHC, k_NKC, v_NKC, visible_keys(block.block, rule.window), rule)


def attend_fixed(
    q_GHC: Tensor, k_NKC: Tensor, v_NKC: Tensor, seen_GN: Tensor, rule: AttentionRule
) -> Tensor:
    """ROWS queries against the keys of one sequence."""
    heads, kv_heads = q_GHC.shape[1], k_NKC.shape[1]
    q_KMC = q_GHC.unflatten(1, (kv_heads, heads // kv_heads)).permute(1, 2, 0, 3).flatten(1, 2)
    scores_KMN = matmul(q_KMC, k_NKC.permute(1, 2, 0)).float() * rule.scale
    if rule.softcap:
        scores_KMN = rule.softcap * torch.tanh(scores_KMN / rule.softcap)
    hidden_MN = ~seen_GN.repeat(heads // kv_heads, 1)
    scores_KMN = scores_KMN.masked_fill(hidden_MN, -torch.inf)
    if rule.sinks_H is not None:
        sinks_KM = (
            rule.sinks_H.float().unflatten(0, (kv_heads, -1)).repeat_interleave(len(q_GHC), 1)
        )
        scores_KMN = torch.cat((scores_KMN, sinks_KM[..., None]), -1)
    weights_KMN = scores_KMN.softmax(-1)[..., : len(k_NKC)].to(q_GHC.dtype)
    out_KMC = matmul(weights_KMN, v_NKC.transpose(0, 1))
    return out_KMC.unflatten(1, (-1, ROWS)).permute(2, 0, 1, 3).flatten(1, 2)


class FixedExperts(Sublayer):
    """A mixture of experts in which an expert sees all rows of the group, and those count that chose it."""

    def __init__(self, layer: ExpertLayer) -> None:
        super().__init__()
        self.layer = layer

    def plain(self, x_GD: Tensor, step: ForwardStep) -> Tensor:
        layer = self.layer
        weights_GN, chosen_GN = layer.router(x_GD)
        y_GD = torch.zeros_like(x_GD)
        for expert in chosen_GN.unique().tolist():  # in ascending order, as everywhere
            mine_GN = chosen_GN == expert
            weight_G1 = (weights_GN * mine_GN).sum(-1, keepdim=True)
            more_GD = y_GD + layer.expert(expert, x_GD) * weight_G1
            y_GD = torch.where(mine_GN.any(-1, keepdim=True), more_GD, y_GD)
        if layer.down_bias_ED is not None:
            y_GD = y_GD + layer.weighed_bias(layer.down_bias_ED, weights_GN, chosen_GN)
        y_GD = layer.shards.reduce(y_GD)
        return y_GD if layer.shared is None else y_GD + layer.shared(x_GD)


def fix_experts(model: Transformer) -> None:
    """Replace the expert layers by ones that compute whole groups; the weights are shared."""
    for layer in model.layers:
        if isinstance(layer.feed_forward, ExpertLayer):
            layer.feed_forward = FixedExperts(layer.feed_forward)


class InvariantRunner(Runner):
    """A runner that takes its steps group by group. On a CPU."""

    def __init__(
        self, model: Transformer, limits: Limits, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(model, limits, dtype)
        self.adapters.obstacle = VARIES
        fix_experts(model)

    def forward(self, staged: Staged, chunks: Sequence[Chunk]) -> Forward:
        inputs = self.batch.make_inputs(staged)
        positions = inputs.positions_T.tolist()
        chunks = _where_they_begin(chunks, positions)
        hidden_TD: Tensor | None = None
        for group in fixed_groups(chunks):
            rows, tokens = _there(group)
            hidden_GD = self._pass(group, chunks, inputs)
            if hidden_TD is None:
                hidden_TD = hidden_GD.new_empty(len(positions), hidden_GD.shape[1])
            hidden_TD[tokens] = hidden_GD[rows]
        if hidden_TD is None:
            raise ValueError("a step without tokens")
        at = staged.sample_at_S.tolist()
        logits_SV = self._logits(hidden_TD[at], [positions[i] for i in at])
        position_S = inputs.positions_T[staged.sample_at_S] + 1
        tokens_S = self.sampler.sample(logits_SV, position_S, staged.sample_rows_S)
        self.keep(staged, tokens_S)
        return Forward(hidden_TD, logits_SV, position_S, tokens_S)

    def _pass(self, group: Group, chunks: Sequence[Chunk], inputs: Inputs) -> Tensor:
        """Run a group through the model, [ROWS, D]."""
        rows, tokens = _there(group)
        tokens_G = torch.zeros(ROWS, dtype=torch.int32)
        positions_G = torch.arange(ROWS, dtype=torch.int32)
        slots_CG = torch.full((len(inputs.slots_GT), ROWS), EMPTY, dtype=torch.int32)
        slots_CG[:, rows] = inputs.slots_GT[:, tokens]
        lengths_G = torch.arange(1, ROWS + 1, dtype=torch.int32)
        for filled, source in ((tokens_G, inputs.tokens_T), (positions_G, inputs.positions_T)):
            filled[rows] = source[tokens]
        blocks = self._blocks(group, chunks, inputs, lengths_G)
        of_token = [b for b, chunk in enumerate(chunks) for _ in range(chunk.count)]
        owners = {
            row: of_token[token]
            for row, token in sorted(zip(rows, tokens, strict=True), key=lambda pair: pair[1])
        }
        tables_GBP = inputs.tables_GBP
        attend = FixedPages(self.pool, slots_CG, positions_G, lengths_G, tables_GBP, blocks, owners)
        return self.model(tokens_G, positions_G, attend)

    def _blocks(
        self, group: Group, chunks: Sequence[Chunk], inputs: Inputs, lengths_G: Tensor
    ) -> list[Block]:
        rows_of: dict[tuple[int, int], list[int]] = {}
        owners = [b for b, chunk in enumerate(chunks) for _ in range(chunk.count)]
        for row, token in enumerate(group):
            if token != EMPTY:
                block = int(inputs.positions_T[token]) // ROWS
                rows_of.setdefault((owners[token], block), []).append(row)
        blocks, size = [], self.limits.page_size
        for (b, block), rows in rows_of.items():
            length = chunks[b].start + chunks[b].count
            lengths_G[rows] = length
            pages_GP = inputs.tables_GBP[:, b, : -(-(block + 1) * ROWS // size)].long()
            blocks.append(Block(rows, block, length, pages_GP))
        return blocks

    def _logits(self, hidden_TD: Tensor, positions: Sequence[int]) -> Tensor:
        """Scores of some tokens, each again at the row of its position."""
        logits_TV = hidden_TD.new_empty(len(positions), self.model.spec.vocab)
        waiting = list(range(len(positions)))
        while waiting:
            at_row = {positions[token] % ROWS: token for token in reversed(waiting)}
            rows, tokens = list(at_row), list(at_row.values())
            hidden_GD = hidden_TD.new_zeros(ROWS, hidden_TD.shape[1])
            hidden_GD[rows] = hidden_TD[tokens]
            logits_TV[tokens] = self.model.logits(hidden_GD)[rows]
            waiting = [token for token in waiting if token not in at_row.values()]
        return logits_TV

    def prompt_scores(self, hidden_TD: Tensor, positions: Sequence[int]) -> Tensor:
        return self._logits(hidden_TD, positions)


def _where_they_begin(chunks: Sequence[Chunk], positions: Sequence[int]) -> list[Chunk]:
    """Chunks with the starts that the step has: behind drafts in flight the scheduler could only hope."""
    placed, at = [], 0
    for chunk in chunks:
        placed.append(msgspec.structs.replace(chunk, start=positions[at]) if chunk.ahead else chunk)
        at += chunk.count
    return placed


def _there(group: Group) -> tuple[list[int], list[int]]:
    """Rows that are not empty, and their tokens."""
    rows = [row for row, token in enumerate(group) if token != EMPTY]
    return rows, [group[row] for row in rows]
