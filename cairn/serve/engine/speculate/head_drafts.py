"""A head drafts on the device, at the end of every step: the drafts lie there when the next step begins.

    step: tokens computed, hidden states tapped, tokens drawn and accepted
    pass 0    every token of the step with the token behind it: the head's own keys and values, and the first draft
    pass j    each row's newest draft, in the place of a token: the next draft

The head's layer is one more layer of the pages, under the same tables. Where a further pass would leave the pages that
a row has by now, it writes nothing and sees no more keys: only drafts can suffer. Everything is tensors of fixed
shapes, so a CUDA graph holds all of it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cairn.models.layer_loop import PlainStep
from cairn.models.transformer import rotations_of
from cairn.serve.engine.request import DRAFTED

if TYPE_CHECKING:
    from cairn.kernels.paged.step_inputs import Inputs, State
    from cairn.models.attend import Attend
    from cairn.models.eagle import EagleHead
    from cairn.models.transformer import Transformer
    from cairn.serve.engine.batch import Staged
    from cairn.serve.engine.pages import Paged
    from cairn.serve.engine.request import Limits

# slots, positions, lengths and tables of rows with one token each -> their attention
AttendRows = Callable[[Tensor, Tensor, Tensor, Tensor], "Paged"]


class HeadDrafts:
    def __init__(self, head: "EagleHead", model: "Transformer", limits: "Limits") -> None:
        self.head, self.model, self.limits = head, model, limits
        device = model.embedding.weight.device
        self.drafts_NK = torch.zeros(limits.rows, limits.drafts, dtype=torch.int32, device=device)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.spec.taps

    def fill(self, staged: "Staged", tokens_T: Tensor) -> None:
        """Put the drafts of the step before in place of DRAFTED."""
        owner_T, place_T = _owners(staged, len(tokens_T))
        rows_T = staged.decided.rows_B[owner_T].clamp(min=0)
        place_T = (place_T - 1).clamp(0, self.limits.drafts - 1)
        tokens_T.copy_(torch.where(tokens_T == DRAFTED, self.drafts_NK[rows_T, place_T], tokens_T))

    def propose(
        self,
        staged: "Staged",
        inputs: "Inputs",
        tapped: list[Tensor],
        drawn_S: Tensor,
        state: "State",
        text_NC: Tensor,
        attend: "Paged",
        attend_rows: AttendRows,
    ) -> None:
        """Draft for the next step, from what this one has computed, drawn and accepted."""
        rows_B = staged.decided.rows_B
        there_B, rows_B = rows_B >= 0, rows_B.clamp(min=0)
        following_T = _following(staged, inputs, drawn_S, text_NC)
        g_TD = self.head.fuse(tapped)
        h_TD = self._pass(following_T, g_TD, inputs.positions_T, attend)
        ends_B = staged.decided.bounds_B1[1:] - 1
        lengths_B = inputs.lengths_B
        if staged.verifies:  # behind the last token that holds
            lengths_B = torch.where(there_B, state.length_N[rows_B], 0)
            ends_B = ends_B - (inputs.lengths_B - lengths_B)
        h_BD = h_TD[ends_B.clamp(0, len(h_TD) - 1)]
        drafts = [self.head.likeliest(h_BD)]
        size = self.limits.page_size
        room_B = -(-inputs.lengths_B // size) * size  # tokens that the row's pages hold
        for more in range(self.limits.drafts - 1):
            positions_B = lengths_B + more
            fits_B = there_B & (positions_B < room_B)
            seen_B = torch.where(there_B, torch.minimum(positions_B + 1, room_B), 0)
            slots_GB = _slots(positions_B, fits_B, inputs.tables_GBP, size)
            places_B = torch.where(fits_B, positions_B, 0)
            rows = attend_rows(slots_GB, places_B, seen_B, inputs.tables_GBP)
            h_BD = self._pass(drafts[-1], h_BD, places_B, rows)
            drafts.append(self.head.likeliest(h_BD))
        # Padding writes to no row: it repeats what its row has.
        new_BK = torch.stack(drafts, 1)
        index_B = torch.where(there_B, rows_B, self.limits.rows)
        kept = torch.cat((self.drafts_NK, new_BK[:1]))
        kept[index_B.long()] = new_BK
        self.drafts_NK.copy_(kept[: self.limits.rows])

    def _pass(
        self, tokens_T: Tensor, g_TD: Tensor, positions_T: Tensor, attend: "Attend"
    ) -> Tensor:
        head = self.head
        x_TD = (
            self.model.embedding(tokens_T) if head.embedding is None else head.embedding(tokens_T)
        )
        rotations = rotations_of(head.spec.layer, range(1), positions_T, attend, x_TD.dtype)
        return head(x_TD, g_TD, PlainStep(attend, rotations))


def _owners(staged: "Staged", tokens: int) -> tuple[Tensor, Tensor]:
    """Of each token of the step its sequence, and its place there."""
    bounds_B1 = staged.decided.bounds_B1
    token_T = torch.arange(tokens, dtype=bounds_B1.dtype, device=bounds_B1.device)
    owner_T = torch.searchsorted(bounds_B1, token_T, right=True) - 1
    owner_T = owner_T.clamp(max=len(bounds_B1) - 2)
    return owner_T, token_T - bounds_B1[owner_T]


def _following(staged: "Staged", inputs: "Inputs", drawn_S: Tensor, text_NC: Tensor) -> Tensor:
    """The token behind each token of the step: what was drawn there, or what the prompt has."""
    tokens = len(inputs.tokens_T)
    owner_T, _ = _owners(staged, tokens)
    rows_T = staged.decided.rows_B[owner_T].clamp(min=0)
    behind_T = (inputs.positions_T + 1).clamp(max=text_NC.shape[1] - 1)
    following_T = torch.cat((text_NC[rows_T, behind_T], drawn_S[:1]))  # one more, for padding
    is_draw_S = staged.sample_rows_S >= 0
    following_T[torch.where(is_draw_S, staged.sample_at_S, tokens).long()] = drawn_S
    return following_T[:tokens].clamp(min=0)


def _slots(positions_B: Tensor, fits_B: Tensor, tables_GBP: Tensor, size: int) -> Tensor:
    places_B = torch.where(fits_B, positions_B // size, 0).long()
    pages_GB = tables_GBP.gather(2, places_B.expand(len(tables_GBP), -1)[..., None])[..., 0]
    return torch.where(fits_B, pages_GB * size + positions_B % size, 0)
