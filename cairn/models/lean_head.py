"""An EAGLE-3 head through the kernels that serve packed weights on a CPU; `models.eagle` has the form to read first.

    norm x and g | q, k, v | rotate, write to pages, attend | out, add | norm, gate, up, SwiGLU | down, add | norm

Some ten operations for a pass, where the plain form has sixty: a head is so small that those took longer than its
products.
"""

from typing import Any, cast

import torch
from torch import Tensor

from cairn.kernels.cpu.packed_product import GATES, NormWeight
from cairn.kernels.cpu.paged_decode import DecodeHeads
from cairn.models.attend import Attend
from cairn.models.eagle import EagleHead, Passed
from cairn.models.layers import FeedForward, Norm
from cairn.models.lean import angles_at, decode_heads, norm_weight, rope_frequencies
from cairn.models.linear.blocks import BlocksForm
from cairn.models.linear.maps import Linear, linears


def obstacle(head: EagleHead) -> str | None:
    """Why this head has no such form, or None."""
    mixer, block = head.layer.attention, head.layer.feed_forward
    if not all(isinstance(part.form, BlocksForm) and part.addend is None for part in linears(head)):
        return "not all of its maps are packed blocks"
    if not mixer.has_fused or decode_heads(mixer) is None:
        return "its heads have no compiled form"
    if not isinstance(block, FeedForward) or block.gate.activation not in GATES:
        return "its feed-forward has no compiled form"
    norms = (*(module for module in head.modules() if isinstance(module, Norm)),)
    return None if all(norm.is_rms for norm in norms) else "its norms have a mean"


class LeanHead:
    """`EagleHead` with the same calls, without gradients."""

    def __init__(self, head: EagleHead) -> None:
        layer = head.layer
        self.head, self.mixer = head, layer.attention
        self.block = cast(FeedForward, layer.feed_forward)
        self.before_heads = norm_weight(cast(Norm, layer.attention_norm))
        self.before_inner = norm_weight(cast(Norm, layer.feed_forward_norm))
        self.of_hidden, self.last = norm_weight(head.hidden_norm), norm_weight(head.norm)
        self.heads = cast(DecodeHeads, decode_heads(self.mixer))
        rope = self.mixer.rope
        self.rope = None if rope is None else rope_frequencies(rope, head.spec.layer)
        self.token_K = (torch.arange(len(head.d2t)) + head.d2t).int()  # of the target's vocabulary

    def fuse(self, tapped: list[Tensor]) -> Tensor:
        return _form(self.head.fc).fused(torch.cat(tapped, -1), self.head.fc.form_bias)

    def passed(
        self,
        x_TD: Tensor,
        g_TD: Tensor,
        positions_T: Tensor,
        attend: Attend,
        ends_B: Tensor | None = None,
    ) -> Passed:
        """Overwrites `g_TD`."""
        pages: Any = attend
        if pages.sequences is None:  # what its tokens see is not for the compiled attention
            return self.head.passed(x_TD, g_TD, positions_T, attend, ends_B)
        normed_TD = _normed(self.of_hidden, g_TD)
        both_TE = torch.cat((_normed(self.before_heads, x_TD), normed_TD), -1)
        h_TD = normed_TD if self.head.spec.norm_before_residual else g_TD
        y_TN = self._attended(both_TE, positions_T, pages)
        if ends_B is not None:  # every token leaves its key and value, and only these go on
            h_TD, y_TN = h_TD[ends_B], y_TN[ends_B]
        h_TD, (out, inner, down) = h_TD.contiguous(), self._maps()
        _form(out).fused(y_TN, out.form_bias, onto_MN=h_TD)
        gated = _form(inner).fused(h_TD, inner.form_bias, self.block.gate, self.before_inner)
        _form(down).fused(gated, down.form_bias, onto_MN=h_TD)
        return Passed(h_TD, _normed(self.last, h_TD))

    def likeliest(self, normed_TD: Tensor) -> Tensor:
        return self.token_K[self.head.head.logits(normed_TD).max(-1).indices]

    def _attended(self, both_TE: Tensor, positions_T: Tensor, pages: Any) -> Tensor:
        qkv, layer = self.mixer.qkv, self.mixer.plain_rule.layer
        qkv_TE = _form(qkv).fused(both_TE, qkv.form_bias)
        places_T11 = positions_T[:, None, None].float()
        angles = None if self.rope is None else angles_at(self.rope, places_T11)
        return pages.placed(qkv_TE, self.heads, angles, layer)

    def _maps(self) -> tuple[Linear, Linear, Linear]:
        return self.mixer.out, self.block.inner, self.block.down


def _form(part: Linear) -> BlocksForm:
    return cast(BlocksForm, part.form)


def _normed(norm: NormWeight, x_TD: Tensor) -> Tensor:
    y_TD = torch.zeros_like(x_TD)
    norm.add_normed(x_TD.contiguous(), y_TD)
    return y_TD
