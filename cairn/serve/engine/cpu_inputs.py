"""Inputs of a step on a CPU: `kernels.step_inputs` and head drafts in NumPy, which is faster for few numbers.

The reference is a chain of thirty small torch operations, which is most of what a step of a small model costs besides
its products. NumPy does the same on the same memory at a tenth of the price.
"""

import numpy as np
from torch import Tensor

from cairn.kernels.paged.step_inputs import Decided, Inputs, State
from cairn.kernels.sampling.draft_ngrams import DRAFTED


def inputs_on_cpu(decided: Decided, state: State, page_size: int, inputs: Inputs) -> None:
    """Fill `inputs`, and enter the new pages into the state's table; as `step_inputs` does."""
    rows_B, starts_B, bounds_B1, first_page_B, page_bounds_B1, pages, given_T = (
        part.numpy() for part in decided
    )
    table_GNP, last_token_N, length_N = (part.numpy() for part in state)
    tokens_T, positions_T, slots_GT, lengths_B, tables_GBP = (part.numpy() for part in inputs)
    pages_VG = pages.reshape(-1, len(table_GNP))
    for b in np.flatnonzero((np.diff(page_bounds_B1) > 0) & (rows_B >= 0)):
        fresh_VG = pages_VG[page_bounds_B1[b] : page_bounds_B1[b + 1]]
        places = slice(first_page_B[b], first_page_B[b] + len(fresh_VG))
        table_GNP[:, rows_B[b], places] = fresh_VG.T

    starts_B = np.where(starts_B < 0, length_N[np.maximum(rows_B, 0)], starts_B)
    counts_B = np.diff(bounds_B1)
    owner_T = np.repeat(np.arange(len(rows_B)), counts_B)
    tokens, row_T = len(owner_T), rows_B[owner_T]
    there_T = row_T >= 0
    row_T = row_T * there_T
    place_T = (starts_B - bounds_B1[:-1])[owner_T] + np.arange(tokens, dtype=np.int32)
    place_T = place_T * there_T
    positions_T[:tokens] = place_T
    page_GT = table_GNP[:, row_T, place_T // page_size]
    slots_GT[:, :tokens] = np.where(there_T, page_GT * page_size + place_T % page_size, -1)
    known_T = np.where(given_T[:tokens] == -1, last_token_N[row_T], given_T[:tokens])
    tokens_T[:tokens] = known_T * there_T
    lengths_B[: len(rows_B)] = (starts_B + counts_B) * (rows_B >= 0)
    tables_GBP[:, : len(rows_B)] = table_GNP[:, np.maximum(rows_B, 0)]


def place_drafts(decided: Decided, inputs: Inputs, text_NC: Tensor, made_NK: Tensor) -> None:
    """Enter the step's tokens into the rows' texts, a head's drafts in place of DRAFTED; as `draft_ngrams` does."""
    bounds, starts = decided.bounds_B1.tolist(), inputs.positions_T.numpy()
    tokens_T, text, drafts_NK = inputs.tokens_T.numpy(), text_NC.numpy(), made_NK.numpy()
    for b, row in enumerate(decided.rows_B.tolist()):
        own = tokens_T[bounds[b] : bounds[b + 1]]
        if row < 0 or not len(own):
            continue
        drafts = np.count_nonzero(own == DRAFTED)
        if drafts:
            own[1:] = drafts_NK[row, :drafts]
        start, there = starts[bounds[b]], own >= 0  # rows of an arena are no tokens
        text[row, start : start + len(own)][there] = own[there]
