"""Inputs of an engine step, computed on the GPU from the few numbers that the host decides.

The host says, for each sequence of the step: which row of state it has, how many tokens it has computed, how many it
computes now, and which pages it has got since. From that one launch makes

    tokens     given by the host, or (-1) what was sampled for the row in the step before, which the host need not know;
               -2 - r stands for row r of the embedding arena and stays as it is
    positions  of each token in its sequence; a start of -1 is the row's length on the device, which only that knows
               while drafts of an earlier step are being verified (`accept_tokens` keeps it)
    slots      page * page_size + place, where its key and value go in each cache group; -1 for padding
    lengths    of each sequence, this step included; 0 for padding
    tables     the pages of each sequence in each cache group, in the order of the step; undefined beyond its length

and keeps the new pages in the rows' own tables. Row -1 is padding: the size of a CUDA graph need not be the size of
the batch. `keep_tokens` then remembers what was sampled. Bytes moved: a few words for each token and page.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.kernels.arguments import INTEGERS, apart, check, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost

BLOCK = 256  # tokens or pages at a time


class Decided(NamedTuple):
    """Decisions of the host about the B sequences and T tokens of a step; all int32."""

    rows_B: Tensor  # row of state, -1: padding
    starts_B: Tensor  # tokens computed before; -1: the row's length on the device
    bounds_B1: Tensor  # which tokens of the step belong to which sequence
    first_page_B: Tensor  # where in the row's table the new pages go
    page_bounds_B1: Tensor  # which of the new places of the tables belong to which sequence
    pages: Tensor  # for each new place one page of every group
    tokens_T: Tensor  # -1: the one sampled last; below: a row of the embedding arena


class State(NamedTuple):
    """State that stays on the GPU between steps, by row; int32."""

    table_GNP: Tensor  # of each cache group
    last_token_N: Tensor
    length_N: Tensor  # tokens computed and accepted; kept by steps that verify drafts, and read after those


class Inputs(NamedTuple):
    """Inputs of the model and its attention; int32."""

    tokens_T: Tensor
    positions_T: Tensor
    slots_GT: Tensor
    lengths_B: Tensor
    tables_GBP: Tensor


def step_inputs_reference(decided: Decided, state: State, page_size: int, inputs: Inputs) -> None:
    rows_B, device = decided.rows_B.long(), decided.rows_B.device
    owner_V = torch.repeat_interleave(decided.page_bounds_B1.diff())  # whose page, whose token
    owner_T = torch.repeat_interleave(decided.bounds_B1.diff())
    place_V = torch.arange(len(owner_V), device=device) - decided.page_bounds_B1[owner_V]
    place_T = torch.arange(len(owner_T), device=device) - decided.bounds_B1[owner_T]
    there_V, row_T = rows_B[owner_V] >= 0, rows_B[owner_T]
    index_V = (decided.first_page_B[owner_V] + place_V)[there_V]
    pages_VG = decided.pages.view(-1, len(state.table_GNP))[: len(owner_V)][there_V]
    state.table_GNP[:, rows_B[owner_V][there_V], index_V] = pages_VG.T

    tokens, padding_T = len(owner_T), row_T < 0
    same = tokens == len(decided.tokens_T)
    require(same, "tokens_T", f"{tokens} tokens, as the bounds have", len(decided.tokens_T))
    row_T = row_T.clamp(min=0)
    kept_B = state.length_N[rows_B.clamp(min=0)]
    starts_B = torch.where(decided.starts_B < 0, kept_B, decided.starts_B)
    positions_T = (starts_B[owner_T] + place_T).masked_fill(padding_T, 0)
    page_GT = state.table_GNP[:, row_T, positions_T // page_size]
    slots_GT = page_GT * page_size + positions_T % page_size
    given_T = torch.where(decided.tokens_T == -1, state.last_token_N[row_T], decided.tokens_T)
    inputs.positions_T[:tokens] = positions_T
    inputs.slots_GT[:, :tokens] = slots_GT.masked_fill(padding_T, -1)
    inputs.tokens_T[:tokens] = given_T.masked_fill(padding_T, 0)
    lengths_B = starts_B + decided.bounds_B1.diff()
    inputs.lengths_B[: len(rows_B)] = lengths_B.masked_fill(rows_B < 0, 0)
    inputs.tables_GBP[:, : len(rows_B)] = state.table_GNP[:, rows_B.clamp(min=0)]


def step_inputs(
    decided: Decided, state: State, page_size: int, inputs: Inputs, impl: Impl = "auto"
) -> None:
    """Fill `inputs`, and enter the new pages into the state's table."""
    sequences, groups = _check_step(decided, state, inputs), len(state.table_GNP)
    chosen = choose("step_inputs", impl, {"triton": needs_cuda(decided.rows_B), "reference": None})
    if chosen.impl == "reference":
        step_inputs_reference(decided, state, page_size, inputs)
    elif sequences:
        # Here and below: Triton is imported where its kernel runs, so that a server on a CPU does without it.
        from cairn.kernels.dependent import pdl
        from cairn.kernels.paged.step_inputs_kernel import _inputs_kernel

        kernel: Any = _inputs_kernel
        table_group, table_row, _ = state.table_GNP.stride()
        tables_group, tables_row, _ = inputs.tables_GBP.stride()
        kernel[(sequences, groups)](
            *decided, *state, *inputs, table_row, tables_row, table_group, inputs.slots_GT.stride(0), tables_group,
            PAGE=page_size, BLOCK=BLOCK, GROUPS=groups, num_warps=2, **pdl(decided.rows_B.device),
        )  # fmt: skip


def _check_step(decided: Decided, state: State, inputs: Inputs) -> int:
    """Check the arguments and return the number of sequences."""
    first = check("rows_B", decided.rows_B, shape=(None,))
    tokens, sequences = decided.tokens_T.numel(), len(first)
    exact = {"B": sequences, "B1": sequences + 1}
    for name, tensor in decided._asdict().items():
        _check_numbers(name, tensor, (exact.get(name.rpartition("_")[2]),), first)
    _check_numbers("table_GNP", state.table_GNP, (None, None, None), first)
    groups, _, width = state.table_GNP.shape
    shapes = {"slots_GT": (groups, None), "tables_GBP": (groups, None, width)}
    for name, tensor in inputs._asdict().items():
        _check_numbers(f"inputs.{name}", tensor, shapes.get(name, (None,)), first)
        rows, room = (tokens if name.endswith("T") else sequences), tensor.shape[name in shapes]
        require(room >= rows, f"inputs.{name}", f"room for {rows}", room)
    whole = decided.pages.numel() % groups == 0
    require(
        whole, "pages", f"a page of each of {groups} groups for every place", len(decided.pages)
    )
    _check_numbers("last_token_N", state.last_token_N, state.table_GNP.shape[1:2], first)
    _check_numbers("length_N", state.length_N, state.table_GNP.shape[1:2], first)
    return sequences


def _check_numbers(name: str, tensor: Tensor, shape: Sequence[int | None], beside: Tensor) -> None:
    check(name, tensor, dtypes=(torch.int32,), shape=shape, beside=beside)
    together = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    require(together, name, "stride 1 in the last dimension", tensor.stride())
    apart(name, tensor)


def keep_tokens(state: State, tokens_B: Tensor, rows_B: Tensor, impl: Impl = "auto") -> None:
    """Remember what was sampled for these rows; row -1 is nobody's."""
    check("rows", rows_B, dtypes=INTEGERS, shape=(None,), packed=True)
    check("tokens", tokens_B, dtypes=(torch.int32,), shape=rows_B.shape, beside=rows_B, packed=True)
    _check_numbers("last_token_N", state.last_token_N, (None,), rows_B)
    chosen = choose("step_inputs", impl, {"triton": needs_cuda(rows_B), "reference": None})
    if chosen.impl == "reference":
        kept = rows_B >= 0
        state.last_token_N[rows_B[kept].long()] = tokens_B[kept]
    elif len(rows_B):
        from cairn.kernels.dependent import pdl
        from cairn.kernels.paged.step_inputs_kernel import _keep_kernel

        kernel: Any = _keep_kernel
        programs = -(-len(rows_B) // BLOCK)
        kernel[(programs,)](
            state.last_token_N, tokens_B, rows_B, len(rows_B), BLOCK=BLOCK, num_warps=2,
            **pdl(rows_B.device),
        )  # fmt: skip


def cost(tokens: int, sequences: int, pages: int) -> Cost:
    """Four words for each token, two for each page of a table, a few for each sequence; of one cache group."""
    return Cost(flops=0.0, bytes=4.0 * (5 * tokens + 2 * pages + 8 * sequences))


def decode_step(
    sequences: int, length: int, page_size: int, device: str, groups: int = 1
) -> tuple[Decided, State, int, Inputs]:
    """A step of one token for each of the sequences, and room for its inputs."""
    pages = -(-length // page_size)

    def integers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    rows_B = torch.randperm(sequences, device=device).int()
    bounds_B1 = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    decided = Decided(rows_B, integers(sequences) + length - 1, bounds_B1, integers(sequences) + pages,
                      integers(sequences + 1), integers(0), integers(sequences) - 1)  # fmt: skip
    table_GNP = torch.randint(1, 9999, (groups, sequences, pages), device=device).int()
    state = State(table_GNP, rows_B * 3, integers(sequences))
    ones = [integers(sequences) for _ in range(3)]
    slots_GT, tables_GBP = integers(groups, sequences), integers(groups, sequences, pages)
    room = Inputs(ones[0], ones[1], slots_GT, ones[2], tables_GBP)
    return decided, state, page_size, room
