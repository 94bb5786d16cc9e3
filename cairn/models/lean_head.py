"""An EAGLE-3 head through the kernels that serve packed weights on a CPU; `models.eagle` has the form to read first.

All passes behind a step are one compiled call, where the plain form has sixty operations for each: a head is so small
that those take longer than its products.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from cairn.kernels.cpu.draft_head import DraftHead, Guesses, HeadParts
from cairn.kernels.cpu.packed_product import GATES, Blocks, PackedMatrix
from cairn.kernels.cpu.paged_decode import DecodeHeads
from cairn.models.eagle import EagleHead
from cairn.models.layers import FeedForward, Norm
from cairn.models.lean import decode_heads, norm_weight, rope_frequencies
from cairn.models.linear.blocks import BlocksForm
from cairn.models.linear.maps import Linear, Vocabulary, linears


def obstacle(head: EagleHead, embedding: Vocabulary) -> str | None:
    """Why this head has no such form, or None. `embedding`: what it looks tokens up in."""
    mixer, block = head.layer.attention, head.layer.feed_forward
    if not all(isinstance(part.form, BlocksForm) and part.addend is None for part in linears(head)):
        return "not all of its maps are packed blocks"
    if any(part.form_bias is not None for part in linears(head)):
        return "a map of it has a bias"
    if not mixer.has_fused or decode_heads(mixer) is None:
        return "its heads have no compiled form"
    if not isinstance(block, FeedForward) or not block.gate.gated:
        return "its feed-forward has no gate"
    if block.gate.activation not in GATES or len(_matrix(block.inner).blocks) != 2:
        return "its feed-forward has no compiled form"
    if _rows_of(embedding) is None:
        return "tokens are looked up in another form"
    norms = (*(module for module in head.modules() if isinstance(module, Norm)),)
    return None if all(norm.is_rms for norm in norms) else "its norms have a mean"


class LeanHead:
    """Drafts as `EagleHead` does, without gradients."""

    def __init__(self, head: EagleHead, embedding: Vocabulary) -> None:
        layer, mixer = head.layer, head.layer.attention
        block = cast(FeedForward, layer.feed_forward)
        self.layer = mixer.plain_rule.layer  # in the cache
        self.compiled = DraftHead(
            HeadParts(
                _matrix(head.fc),
                _matrix(mixer.qkv),
                _matrix(mixer.out),
                _matrix(block.inner),
                _matrix(block.down),
                _matrix(head.head),
                norm_weight(cast(Norm, layer.attention_norm)),
                norm_weight(head.hidden_norm),
                norm_weight(cast(Norm, layer.feed_forward_norm)),
                norm_weight(head.norm),
                cast(DecodeHeads, decode_heads(mixer)),
                block.gate.activation,
                cast(Blocks | Tensor, _rows_of(embedding)),
                torch.arange(len(head.d2t)) + head.d2t,
                _waves(head),
                head.spec.norm_before_residual,
            )
        )

    def drafted(
        self,
        tapped: list[Tensor],
        following_T: Tensor,
        positions_T: Tensor,
        ends_B: Tensor,
        lengths_B: Tensor,
        attend: Any,
        passes: int,
        least: Sequence[float] | None,
    ) -> Guesses | None:
        """Draft tokens; None if the compiled attention does not support this step."""
        if attend.sequences is None:
            return None
        pages = (*attend.pool.addresses[self.layer], attend.pool.group_of[self.layer])
        where = (following_T, positions_T, ends_B, lengths_B, attend.sequences, pages)
        return self.compiled.draft(tapped, *where, passes, least)


def _matrix(part: Linear) -> PackedMatrix:
    return cast(BlocksForm, part.form).matrix


def _rows_of(embedding: Vocabulary) -> Blocks | Tensor | None:
    """Rows for the compiled embedding lookup, packed or floats; None if it does not support this form."""
    if embedding.lookup_addend is not None or embedding.shards.size > 1:
        return None
    form = embedding.lookup or embedding.form
    if isinstance(form, BlocksForm):
        blocks = form.matrix.blocks
        return blocks[0] if len(blocks) == 1 else None
    weight = embedding.weight.detach()
    is_plain = form is None and weight.dtype == torch.float32 and weight.is_contiguous()
    return weight if is_plain else None


def _waves(head: EagleHead) -> Tensor | None:
    """[frequency, factor of cosines, factor of sines] of each column."""
    rope = head.layer.attention.rope
    if rope is None:
        return None
    rotation = rope_frequencies(rope, head.spec.layer)
    amplitude = torch.as_tensor(rotation.amplitude, dtype=torch.float32)
    half = len(rotation.frequency_C) // 2
    of_cosine_C = amplitude.expand(half).repeat(2)
    return torch.stack((rotation.frequency_C, of_cosine_C, rotation.signed_2c.flatten()))
