"""Logits after a grammar's mask and the penalties on what was said before, in float32.

    repetition    seen in prompt or answer: a positive logit is divided by it, a negative one multiplied; 1: none
    frequency     that much less for each time the token is in the answer; 0: none
    presence      that much less if it is in the answer at all; 0: none
    mask          -inf where the grammar does not allow the token

State stays on the GPU: how often each token was generated, and one bit for each token of the prompt. `count` adds the
tokens that were just chosen. Knows nothing about sampling. Bytes moved: logits read, float32 written; counts are read
only for rows that have a penalty.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.kernels.arguments import FLOATS, INTEGERS, check, output, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost


class Penalties(NamedTuple):
    """Penalties of each row of state."""

    repetition_N: Tensor  # float32
    presence_N: Tensor  # float32
    frequency_N: Tensor  # float32
    counts_NV: Tensor  # int32: how often each token was generated
    # Int32 words of 32 bits: bit v % 32 of word v // 32 set if v is in the prompt.
    prompt_NW: Tensor | None = None


def words(vocabulary: int) -> int:
    return -(-vocabulary // 32)


def bits_reference(words_BW: Tensor, vocabulary: int) -> Tensor:
    """Words of 32 bits -> bool [B, V]."""
    place = torch.arange(32, device=words_BW.device)
    return (words_BW[..., None] >> place & 1).flatten(1)[:, :vocabulary].bool()


def penalize_reference(
    logits_BV: Tensor, penalties: Penalties | None, rows_B: Tensor, allowed_BW: Tensor | None
) -> Tensor:
    scores_BV, vocabulary = logits_BV.float(), logits_BV.shape[1]
    if penalties is not None:
        rows_B = rows_B.clamp(min=0).long()
        repetition, presence, frequency = (tensor[rows_B][:, None] for tensor in penalties[:3])
        counts_BV = penalties.counts_NV[rows_B]
        seen_BV = counts_BV > 0
        if penalties.prompt_NW is not None:
            seen_BV = seen_BV | bits_reference(penalties.prompt_NW[rows_B], vocabulary)
        weaker_BV = torch.where(scores_BV > 0, scores_BV / repetition, scores_BV * repetition)
        scores_BV = torch.where(seen_BV, weaker_BV, scores_BV)
        scores_BV = scores_BV - (frequency * counts_BV + presence * (counts_BV > 0))
    if allowed_BW is not None:
        scores_BV = scores_BV.masked_fill(~bits_reference(allowed_BW, vocabulary), -torch.inf)
    return scores_BV


def penalize(
    logits_BV: Tensor,
    penalties: Penalties | None = None,
    *,
    rows_B: Tensor | None = None,
    allowed_BW: Tensor | None = None,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """float32 [B, V]. `rows_B`: which row of `penalties` belongs to which row of logits; None: the same."""
    check("logits", logits_BV, dtypes=FLOATS, shape=(None, None))
    batch, vocabulary = logits_BV.shape
    require(
        logits_BV.stride(1) == 1 or vocabulary == 1,
        "logits",
        "stride 1 in the last dimension",
        logits_BV.stride(),
    )
    if penalties is not None:
        _check_penalties(penalties, logits_BV, batch if rows_B is None else None)
    if allowed_BW is not None:
        check(
            "allowed",
            allowed_BW,
            dtypes=(torch.int32,),
            shape=(batch, words(vocabulary)),
            beside=logits_BV,
        )
        require(
            allowed_BW.stride(1) == 1,
            "allowed",
            "stride 1 in the last dimension",
            allowed_BW.stride(),
        )
    if rows_B is None:
        rows_B = torch.arange(batch, device=logits_BV.device)
    check("rows", rows_B, dtypes=INTEGERS, shape=(batch,), beside=logits_BV, packed=True)
    out = output("out", out, (batch, vocabulary), torch.float32, logits_BV)
    if (
        choose("penalties", impl, {"triton": needs_cuda(logits_BV), "reference": None}).impl
        == "reference"
    ):
        return out.copy_(penalize_reference(logits_BV, penalties, rows_B, allowed_BW))
    if batch:
        _launch(logits_BV, penalties, rows_B, allowed_BW, out)
    return out


def _launch(
    logits_BV: Tensor,
    penalties: Penalties | None,
    rows_B: Tensor,
    allowed_BW: Tensor | None,
    out: Tensor,
) -> None:
    from cairn.kernels.sampling.penalties_kernel import _penalize_kernel

    (batch, vocabulary), block = logits_BV.shape, 4096
    prompt_NW = None if penalties is None else penalties.prompt_NW
    tensors = (
        *(penalties[:4] if penalties else (out,) * 4),
        out if prompt_NW is None else prompt_NW,
    )
    allowed = out if allowed_BW is None else allowed_BW  # stands in, is not read
    kernel: Any = _penalize_kernel
    kernel[(batch * -(-vocabulary // block),)](
        logits_BV, out, rows_B, *tensors, allowed,
        *(tensor.stride(0) for tensor in (logits_BV, out, *tensors[3:], allowed)),
        VOCABULARY=vocabulary, BLOCK=block, PENALTIES=penalties is not None, PROMPT=prompt_NW is not None,
        ALLOWED=allowed_BW is not None, num_warps=8,
    )  # fmt: skip


def count(penalties: Penalties, tokens_B: Tensor, rows_B: Tensor, impl: Impl = "auto") -> None:
    """Add each row's token to its counts; a row of -1 is padding. Exact, whatever the order."""
    check("counts", penalties.counts_NV, dtypes=(torch.int32,), shape=(None, None), packed=True)
    check(
        "tokens", tokens_B, dtypes=INTEGERS, shape=(None,), beside=penalties.counts_NV, packed=True
    )
    check("rows", rows_B, dtypes=INTEGERS, shape=tokens_B.shape, beside=tokens_B, packed=True)
    if (
        choose("penalties", impl, {"triton": needs_cuda(tokens_B), "reference": None}).impl
        == "reference"
    ):
        real = rows_B >= 0
        places = (rows_B[real].long(), tokens_B[real].long())
        penalties.counts_NV.index_put_(places, torch.ones_like(places[0]).int(), accumulate=True)
    elif tokens_B.numel():
        from cairn.kernels.sampling.penalties_kernel import _count_kernel

        kernel: Any = _count_kernel
        kernel[(-(-tokens_B.numel() // 128),)](
            penalties.counts_NV, tokens_B, rows_B, tokens_B.numel(), penalties.counts_NV.stride(0), BLOCK=128,
        )  # fmt: skip


def _check_penalties(penalties: Penalties, logits_BV: Tensor, rows: int | None) -> None:
    vocabulary = logits_BV.shape[1]
    counts_NV = penalties.counts_NV
    check(
        "counts",
        counts_NV,
        dtypes=(torch.int32,),
        shape=(rows, vocabulary),
        beside=logits_BV,
        packed=True,
    )
    for name, tensor in zip(Penalties._fields[:3], penalties[:3], strict=True):
        name = name.removesuffix("_N")
        check(
            name,
            tensor,
            dtypes=(torch.float32,),
            shape=counts_NV.shape[:1],
            beside=logits_BV,
            packed=True,
        )
    if penalties.prompt_NW is not None:
        shape = (counts_NV.shape[0], words(vocabulary))
        check(
            "prompt",
            penalties.prompt_NW,
            dtypes=(torch.int32,),
            shape=shape,
            beside=logits_BV,
            packed=True,
        )


def cost(batch: int, vocabulary: int, bytes_each: int = 2, penalties: bool = True) -> Cost:
    counted = 4 + 1 / 8 if penalties else 0
    return Cost(
        flops=4.0 * batch * vocabulary, bytes=batch * vocabulary * (bytes_each + 4 + counted)
    )


def random_penalties(rows: int, vocabulary: int, device: str = "cuda") -> Penalties:
    """A tenth of the tokens have been seen, most of them once or twice."""
    counts_NV = torch.randint(-18, 3, (rows, vocabulary), device=device).clamp(min=0).int()
    prompt_NW = torch.randint(-(2**31), 2**31, (rows, words(vocabulary)), device=device).int()
    uniform = torch.rand(3, rows, device=device)
    return Penalties(1 + uniform[0], uniform[1], uniform[2], counts_NV, prompt_NW)
