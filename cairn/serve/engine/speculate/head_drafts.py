"""A head drafts on the device, at the end of every step: the drafts lie there when the next step begins.

    step: tokens computed, hidden states tapped, tokens drawn and accepted
    pass 0    every token of the step with the token behind it: the head's own keys and values, and the first draft
    pass j    each row's newest draft, in the place of a token: the next draft

The head's layer is one more layer of the pages, under the same tables. Where a further pass would leave the pages that
a row has by now, it writes nothing and sees no more keys: only drafts can suffer. Everything is tensors of fixed
shapes, so a CUDA graph holds all of it. `kernels.draft_ngrams` puts the drafts in place.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cairn.kernels.paged.step_inputs import Inputs, State
    from cairn.models.attend import Attend
    from cairn.models.eagle import DraftPass
    from cairn.models.lean_head import LeanHead
    from cairn.models.mtp import DraftHead
    from cairn.models.transformer import Transformer
    from cairn.serve.engine.batch import Staged
    from cairn.serve.engine.pages import Paged
    from cairn.serve.engine.request import Limits

# slots, positions, lengths and tables of rows with one token each -> their attention
AttendRows = Callable[[Tensor, Tensor, Tensor, Tensor], "Paged"]


class HeadForm(Protocol):
    """An `EagleHead` or an `MtpHead` itself, or on a GPU `FusedHead` or `FusedMtp`."""

    def fuse(self, tapped: list[Tensor]) -> Tensor:
        """The hidden states of the target in one."""
        ...

    def passed(
        self,
        x_TD: Tensor,
        g_TD: Tensor,
        positions_T: Tensor,
        attend: "Attend",
        ends_B: Tensor | None = None,
    ) -> "DraftPass":
        """`ends_B`: the tokens whose results are wanted; None: all of them."""
        ...

    def likeliest(self, normed_TD: Tensor) -> Tensor: ...


class ChancedForm(HeadForm, Protocol):
    """A head that says how sure it is."""

    def guessed(self, normed_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens, and their chances."""
        ...


class Places(NamedTuple):
    """Positions and slots of draft passes 1 to K - 1 for each sequence."""

    positions_KB: Tensor
    seen_KB: Tensor  # keys, their own included
    slots_KGB: Tensor


class HeadDrafts:
    def __init__(self, head: "DraftHead", model: "Transformer", limits: "Limits") -> None:
        self.taps, self.model, self.limits = head.taps, model, limits
        self.form: HeadForm = head
        self.embedding = model.embedding if head.embedding is None else head.embedding
        device = model.embedding.weight.device

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.drafts_NK = integers(limits.rows + 1, limits.drafts)  # the last row: of padding
        self._more_K1 = integers(limits.drafts - 1, 1)
        self._more_K1[:, 0] = torch.arange(limits.drafts - 1)
        self._sequences = torch.arange(2 * limits.rows, device=device)
        self.compiled: LeanHead | None = None  # all passes in one call
        # Of each number of drafts but the last, the chance that they hold from which on a further pass is made; None:
        # all of them are.
        self.least: Sequence[float] | None = None
        self.chances_BK: Tensor | None = None  # of the newest drafts, of each sequence of the step
        self.passes_s = 0.0  # that the last passes took; a CPU has computed when they are launched

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
        """Draft for the next step, from what this one has computed, drawn and accepted.

        `tapped`: the hidden states behind each of `taps`; without taps, those behind the last norm.
        """
        began = time.thread_time()
        rows_B, lengths_B = staged.decided.rows_B, inputs.lengths_B
        following_T = drawn_S if staged.each_drawn else _following(staged, inputs, drawn_S, text_NC)
        ends_B = staged.decided.bounds_B1[1:] - 1
        if staged.verifies:  # behind the last token that holds; row -1 is padding, and goes nowhere
            lengths_B = state.length_N[rows_B]
            ends_B = ends_B - (inputs.lengths_B - lengths_B)
        # Where every token is followed by a draw, the second half of the sequences is padding.
        real = slice(len(rows_B) // 2 if staged.each_drawn else len(rows_B))
        ends_B = ends_B[real].clamp(0, len(following_T) - 1)
        tables_GBP, lengths_B = inputs.tables_GBP[:, real], lengths_B[real]
        guesses = None
        if self.compiled is not None and not staged.each_drawn:
            where = (following_T, inputs.positions_T, ends_B, lengths_B, attend)
            guesses = self.compiled.drafted(tapped, *where, self.limits.drafts, self.least)
        if guesses is not None:
            drafts_BK, self.chances_BK = guesses.drafts_BK, guesses.chances_BK
        else:
            x_TD, g_TD = self.embedding(following_T), self.form.fuse(tapped)
            h_BD, normed_BD = self.form.passed(x_TD, g_TD, inputs.positions_T, attend, ends_B)
            places = self._places(lengths_B, inputs.lengths_B[real], tables_GBP)
            if self.least is None:
                drafts_BK = self._every_pass(h_BD, normed_BD, places, tables_GBP, attend_rows)
            else:
                drafts_BK = self._passes(h_BD, normed_BD, places, tables_GBP, attend_rows)
        self.drafts_NK[rows_B[real]] = drafts_BK
        self.passes_s = time.thread_time() - began

    def _every_pass(
        self,
        h_BD: Tensor,
        normed_BD: Tensor,
        places: Places,
        tables_GBP: Tensor,
        attend_rows: AttendRows,
    ) -> Tensor:
        drafts = [self.form.likeliest(normed_BD)]
        for place in zip(*places, strict=True):
            h_BD, normed_BD = self._further(h_BD, drafts[-1], place, tables_GBP, attend_rows)
            drafts.append(self.form.likeliest(normed_BD))
        return torch.stack(drafts, 1)

    def _passes(
        self,
        h_BD: Tensor,
        normed_BD: Tensor,
        places: Places,
        tables_GBP: Tensor,
        attend_rows: AttendRows,
    ) -> Tensor:
        """Run draft passes while the confidence exceeds the thresholds in `least`."""
        form = cast(ChancedForm, self.form)
        newest, chances_B = form.guessed(normed_BD)
        drafts, chances, held_B = [newest], [chances_B], chances_B
        for place, least in zip(zip(*places, strict=True), self.least or (), strict=True):
            if float(held_B.max()) < least:
                break
            h_BD, normed_BD = self._further(h_BD, drafts[-1], place, tables_GBP, attend_rows)
            newest, chances_B = form.guessed(normed_BD)
            drafts.append(newest)
            chances.append(chances_B)
            held_B = held_B * chances_B
        missing = self.limits.drafts - len(drafts)
        drafts += missing * [torch.zeros_like(newest)]
        self.chances_BK = torch.stack(chances + missing * [torch.zeros_like(chances_B)], 1)
        return torch.stack(drafts, 1)

    def _further(
        self,
        h_BD: Tensor,
        newest_B: Tensor,
        place: tuple[Tensor, Tensor, Tensor],
        tables_GBP: Tensor,
        attend_rows: AttendRows,
    ) -> "DraftPass":
        positions_B, seen_B, slots_GB = place
        rows = attend_rows(slots_GB, positions_B, seen_B, tables_GBP)
        return self.form.passed(self.embedding(newest_B), h_BD, positions_B, rows)

    def _places(self, lengths_B: Tensor, paged_B: Tensor, tables_GBP: Tensor) -> Places:
        """Compute the places of all further passes at once, because small kernels cost as much as large ones.

        `paged_B`: tokens for which each sequence has pages, 0 for padding.
        """
        size = self.limits.page_size
        room_B = (paged_B + (size - 1)) // size * size
        next_KB = lengths_B + self._more_K1
        fits_KB = next_KB < room_B
        positions_KB = torch.where(fits_KB, next_KB, 0)
        sequences_B = self._sequences[: len(lengths_B)]
        pages_GKB = tables_GBP[:, sequences_B, positions_KB // size]
        slots_GKB = torch.add(positions_KB % size, pages_GKB, alpha=size)
        # Rows that do not fit write to the null page.
        slots_KGB = torch.where(fits_KB, slots_GKB, 0).transpose(0, 1).contiguous()
        return Places(positions_KB, torch.minimum(next_KB + 1, room_B), slots_KGB)


def _following(staged: "Staged", inputs: "Inputs", drawn_S: Tensor, text_NC: Tensor) -> Tensor:
    """The token behind each token of the step: what was drawn there, or what the prompt has."""
    tokens, bounds_B1 = len(inputs.tokens_T), staged.decided.bounds_B1
    token_T = torch.arange(tokens, dtype=bounds_B1.dtype, device=bounds_B1.device)
    owner_T = torch.searchsorted(bounds_B1, token_T, right=True) - 1
    owner_T = owner_T.clamp(max=len(bounds_B1) - 2)
    rows_T = staged.decided.rows_B[owner_T].clamp(min=0)
    behind_T = (inputs.positions_T + 1).clamp(max=text_NC.shape[1] - 1)
    following_T = torch.cat((text_NC[rows_T, behind_T], drawn_S[:1]))  # one more, for padding
    is_draw_S = staged.sample_rows_S >= 0
    following_T[torch.where(is_draw_S, staged.sample_at_S, tokens).long()] = drawn_S
    return following_T[:tokens].clamp(min=0)
