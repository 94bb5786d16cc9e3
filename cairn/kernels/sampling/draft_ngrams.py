"""Drafts by prompt lookup, made on the GPU: what followed the last tokens of a row when they stood in its text before.

    text of the row     .. a b c d e .. x a b c      the longest match decides, of equally long ones the newest
                             match d e       ^last
    tokens of the step  c ? ?  -->  c d e            behind the end of the text the drafts repeat from the match on

Every row has its text on the device. A step enters the tokens that it computes there, drafts included: those that do
not hold lie behind the row's length and are overwritten. The host decides how many drafts a row has and need not know
them: it writes DRAFTED in their place, behind one token of the row. A row without a match drafts token 0. Where
somebody else has drafted on the device (a head), those drafts are put in place and nothing is searched. Whatever is
drafted is verified, so no draft changes an answer. Bytes moved: one word for each token of the text, twice that for
those that match.
"""

from typing import Any

import torch
from torch import Tensor

from cairn.kernels.arguments import apart, check, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.sampling.accept_tokens import LANES

DRAFTED = -(2**31)  # in place of a token: the device drafts it
SHORTEST = 2  # tokens of a match
LONGEST = 24  # compared backwards
SEARCHED = 32768  # tokens of the text: the last ones
BLOCK = 1024  # places compared at once
PLACE_BITS = 24  # a place in a text has so many


def draft_ngrams_reference(
    rows_B: Tensor,
    bounds_B1: Tensor,
    tokens_T: Tensor,
    positions_T: Tensor,
    text_NC: Tensor,
    made_NK: Tensor | None = None,
) -> None:
    bounds = bounds_B1.tolist()
    for b, row in enumerate(rows_B.tolist()):
        tokens, first = tokens_T[bounds[b] : bounds[b + 1]], bounds[b]
        if row < 0 or not len(tokens):
            continue
        start, text_C = int(positions_T[first]), text_NC[row]
        drafts = int((tokens == DRAFTED).sum())
        if drafts:
            text_C[start] = tokens[0]
            if made_NK is not None:
                tokens[1:] = made_NK[row, :drafts]
            else:
                found = drafts_of(text_C[: start + 1].tolist(), drafts)
                tokens[1:] = torch.tensor(found, dtype=tokens.dtype)
        there = tokens >= 0
        text_C[start : start + len(tokens)][there] = tokens[there]


def drafts_of(text: list[int], count: int) -> list[int]:
    """The definition: what follows the best match with the end of the text."""
    length = len(text)
    best = (0, 0)
    for at in range(max(SHORTEST, length - SEARCHED), length):
        match = 0
        while match < min(at, LONGEST) and text[at - 1 - match] == text[-1 - match]:
            match += 1
        if match >= SHORTEST:
            best = max(best, (match, at))
    at = best[1]
    return [text[at + i % (length - at)] for i in range(count)] if at else [0] * count


def draft_ngrams(
    rows_B: Tensor,
    bounds_B1: Tensor,
    tokens_T: Tensor,
    positions_T: Tensor,
    text_NC: Tensor,
    made_NK: Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Enter the step's tokens into the rows' texts, and put drafts in place of DRAFTED. Row -1 is padding.

    A sequence with drafts has one token before them. `made_NK`: of each row the drafts that a head has made, as many as
    any sequence has (not checked: the device knows); None: they are searched in its text.
    """
    first = check("rows_B", rows_B, dtypes=(torch.int32,), shape=(None,), packed=True)
    sequences = len(first)
    shapes = {"bounds_B1": (sequences + 1,), "tokens_T": (None,), "positions_T": tokens_T.shape}
    given = {"bounds_B1": bounds_B1, "tokens_T": tokens_T, "positions_T": positions_T}
    for name, tensor in given.items():
        check(name, tensor, dtypes=(torch.int32,), shape=shapes[name], beside=first, packed=True)
    check("text_NC", text_NC, dtypes=(torch.int32,), shape=(None, None), beside=first, packed=True)
    if made_NK is not None:
        check(
            "made_NK", made_NK, dtypes=(torch.int32,), shape=(None, None), beside=first, packed=True
        )
        wanted = f"a row for each of the {len(text_NC)} texts"
        require(len(made_NK) >= len(text_NC), "made_NK", wanted, len(made_NK))
    for name, tensor in (("tokens_T", tokens_T), ("text_NC", text_NC)):
        apart(name, tensor)
    longest = text_NC.shape[1]
    require(longest < 1 << PLACE_BITS, "text_NC", f"rows shorter than {1 << PLACE_BITS}", longest)
    offers = {"triton": needs_cuda(rows_B), "reference": None}
    if choose("draft_ngrams", impl, offers).impl == "reference":
        draft_ngrams_reference(rows_B, bounds_B1, tokens_T, positions_T, text_NC, made_NK)
    elif sequences:
        from cairn.kernels.dependent import pdl
        from cairn.kernels.sampling.draft_ngrams_kernel import _draft_kernel

        kernel: Any = _draft_kernel
        kernel[(sequences,)](
            rows_B,
            bounds_B1,
            tokens_T,
            positions_T,
            text_NC,
            made_NK,
            text_NC.stride(0),
            0 if made_NK is None else made_NK.stride(0),
            **CONSTANTS,
            num_warps=8,
            **pdl(first.device),
        )


CONSTANTS = {
    "DRAFTED": DRAFTED,
    "SHORTEST": SHORTEST,
    "LONGEST": LONGEST,
    "SEARCHED": SEARCHED,
    "PLACE_BITS": PLACE_BITS,
    "BLOCK": BLOCK,
    "LANES": LANES,
}


def cost(sequences: int, length: int, drafts: int) -> Cost:
    return Cost(flops=0.0, bytes=4.0 * sequences * (2 * length + 4 * drafts))


def random_texts(
    sequences: int, length: int, drafts: int, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows that repeat themselves here and there, in a step that drafts for each of them."""
    width = 1 + drafts

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, dtype=torch.int32, device=device)

    rows_B = torch.randperm(sequences, device=device).int()
    bounds_B1 = width * torch.arange(sequences + 1, dtype=torch.int32, device=device)
    tokens_T = torch.full((sequences * width,), DRAFTED, dtype=torch.int32, device=device)
    tokens_T[::width] = integers(9, sequences)
    place_T = torch.arange(sequences * width, dtype=torch.int32, device=device) % width
    return rows_B, bounds_B1, tokens_T, place_T + length - 1, integers(9, sequences, length + width)
