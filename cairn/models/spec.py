"""Model specification: the shape of a model, and its cost.

A `ModelSpec` is everything that decides the computation of a decoder: no weights, no torch, no file names.
`families` makes one from a checkpoint's config, `transformer` builds the model from it, and the planner,
the profiler and the simulator read its counts. Each count is the exact one, not a rule of thumb: parameters
are those of the built model, FLOPs count a multiply-add as two and leave out norms and activations.

    D hidden   H heads   K key/value heads   C head size   F feed-forward   V vocabulary   E experts
"""

from typing import Literal

import msgspec

from cairn.models.mixer import MIXERS, MixerShape
from cairn.models.spec_checks import check_spec

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "clamped_silu"]
CLAMPED_ALPHA = 1.702  # of clamped_silu: x * sigmoid(alpha x)


class Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rotary positions, and how they are stretched beyond the context they were trained for."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    original_context: int = 0  # trained length; 0: the model's context
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope; None: computed from factor and mscales
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn: round the corrected range outwards to whole dimensions
    # longrope: divisors of the frequencies up to the trained length, and of a model whose context is longer
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    rotated: int = 0  # columns of a head that are rotated; 0: all
    # Pairs of columns that turn by the frame, the row and the column of a picture's patch; (): all by the position.
    sections: tuple[int, ...] = ()
    interleaved: bool = False  # sections: every third pair is of one axis, as far as its count goes
    # Queries are multiplied by 1 + temperature * log(1 + position // original_context); 0: they are not.
    temperature: float = 0.0

    @property
    def is_tabulated(self) -> bool:
        """Return whether the rotation is a table by position: angles do not depend on the length, nor q on more.

        With sections a token has a position on each axis, and its row is made of three rows of the table.
        """
        return self.kind != "dynamic" and not self.temperature


class Experts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mixture of experts in place of the dense feed-forward layer."""

    count: int
    per_token: int
    intermediate: int
    gate: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True  # the chosen weights sum to one
    scale: float = 1.0  # on the weights, after renormalising
    # A bias per expert is added to the scores for choosing, not for weighing.
    choice_bias: bool = False
    groups: int = 1  # of equally many neighbours, of which a token visits the `top_groups` best
    top_groups: int = 1
    logit_bias: bool = False  # the router's product has a bias
    biases: bool = False  # the experts' products have biases
    shared_intermediate: int = 0  # an expert that every token visits; 0: none
    shared_gate: bool = False  # that expert's result is weighed by the sigmoid of a product
    dense_layers: tuple[int, ...] = ()  # layers that keep the dense feed-forward


class Latent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Latent attention (MLA, arXiv:2405.04434): keys and values of all heads are products of one narrow row."""

    rank: int  # columns of the row that keys and values are made of
    unrotated: int  # columns of a head's queries and keys without positions
    rotated: int  # columns with rotary positions, the same key for all heads
    value: int  # columns of a head's values
    query_rank: int = 0  # queries go through a product of this rank; 0: they are one product
    interleaved: bool = True  # rotary positions pair columns (0, 1), (2, 3) ..; else i and i + half

    @property
    def width(self) -> int:
        """Columns that are cached for a token."""
        return self.rank + self.rotated


class DeltaSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A gated delta net (arXiv:2412.06464): heads of values share heads of keys."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    kernel: int = 4  # tokens that the convolution before it sees

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        return self.value_heads * self.value_width


class ShortConvSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A gated convolution over few tokens (LFM2)."""

    kernel: int = 3
    bias: bool = False


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int  # the most positions the model may see
    tied: bool = False  # the output projection is the embedding
    # normalisation
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_plus_one: bool = False  # Gemma stores w - 1
    pre_norms: bool = True  # a block's input is normed; OLMo 2 does not
    post_norms: bool = False  # Gemma norms a block's output as well as its input
    qk_norm: bool = False
    qk_norm_over: Literal["head", "width"] = "head"  # width: all heads of a token at once
    qk_norm_rotated: bool = False  # normed after the rotation rather than before
    # projections
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    gated: bool = True  # act(gate(x)) * up(x) rather than act(up(x))
    activation_limit: float = 0.0  # of clamped_silu, on its inputs
    experts: Experts | None = None
    # positions and attention
    mixer: str = "attention"  # what a layer does along the sequence, by its name in `models.mixer`
    mixers: tuple[str, ...] = ()  # per layer, where they differ; empty: `mixer` everywhere
    delta: DeltaSizes | None = None  # of the mixer `delta`
    short_conv: ShortConvSizes | None = None  # of the mixer `short_conv`
    output_gate: bool = False  # what attention gives is multiplied by the sigmoid of a product
    latent: Latent | None = None  # of the mixer `latent`
    sinks: bool = False  # each head has one more logit in its softmax, which no value belongs to
    positions: Literal["rope", "learned"] = "rope"
    rope: Rope = Rope()
    rope_local: Rope | None = None  # for windowed layers, where it differs
    nope_layers: tuple[int, ...] = ()  # layers whose attention knows no positions
    windows: tuple[int, ...] = ()  # per layer; 0 sees everything; empty: all layers do
    query_scale: float = 0.0  # on q @ k; 0: head_dim ** -0.5
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    deep_rows: int = 0  # layers behind which rows of given embeddings are added (DeepStack)
    residual_scale: float = 1.0  # on what a block adds to the residual
    logit_divisor: float = 1.0
    # tokens the checkpoint names
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_spec(self)

    # -- derived shapes -----------------------------------------------------------------------

    @property
    def scale(self) -> float:
        return self.query_scale or self.head_dim**-0.5

    @property
    def rotary_dim(self) -> int:
        """Columns of a head that rotary positions rotate."""
        return self.latent.rotated if self.latent else self.head_dim

    def window(self, layer: int) -> int:
        """Window of a layer in tokens, the current one included; 0 for full attention."""
        return self.windows[layer] if self.windows else 0

    def rope_of(self, layer: int) -> Rope | None:
        """RoPE of a layer, or None."""
        if self.positions != "rope" or layer in self.nope_layers or self.keeps_state(layer):
            return None
        return self.rope_local if self.rope_local and self.window(layer) else self.rope

    def ropes(self, layers: range) -> dict[Rope, None]:
        """Each kind of rotary positions in some of the layers, once."""
        return dict.fromkeys(rope for i in layers if (rope := self.rope_of(i)) is not None)

    def mixer_of(self, layer: int) -> str:
        return self.mixers[layer] if self.mixers else self.mixer

    def mixer_shape(self, layer: int) -> MixerShape:
        """The counts of what a layer does along the sequence."""
        return MIXERS[self.mixer_of(layer)].shape

    def keeps_state(self, layer: int) -> bool:
        """Return whether a layer keeps a state per sequence instead of a cache per token."""
        return MIXERS[self.mixer_of(layer)].state

    @property
    def token_layers(self) -> list[int]:
        """Layers that keep something of each token."""
        return [layer for layer in range(self.layers) if not self.keeps_state(layer)]

    @property
    def is_recurrent(self) -> bool:
        """Return whether some layers keep a state."""
        return len(self.token_layers) < self.layers

    def experts_of(self, layer: int) -> Experts | None:
        return self.experts if self.experts and layer not in self.experts.dense_layers else None

    # -- parameters ---------------------------------------------------------------------------

    def parameters(self) -> int:
        return self._count(active=False)

    def active_parameters(self) -> int:
        """Number of parameters active for a token: all of them unless the model has experts."""
        return self._count(active=True)

    def weight_bytes(self, bytes_per_value: float = 2) -> float:
        return self.parameters() * bytes_per_value

    def _count(self, active: bool) -> int:
        norm = self.hidden * (2 if self.norm == "layer" else 1)
        total = self.vocab * self.hidden * (1 if self.tied else 2) + norm
        if self.positions == "learned":
            total += self.context * self.hidden
        per_layer_norms = norm * 2 * (self.pre_norms + self.post_norms)
        for layer in range(self.layers):
            total += per_layer_norms + self.mixer_shape(layer).parameters(self)
            total += self._feed_forward_parameters(layer, active)
        return total

    def _feed_forward_parameters(self, layer: int, active: bool) -> int:
        experts = self.experts_of(layer)
        if experts is None:
            return self._dense_parameters(self.intermediate)
        visited = experts.per_token if active else experts.count
        routed = (2 + self.gated) * self.hidden * visited * experts.intermediate
        shared = self._dense_parameters(experts.shared_intermediate)
        per_expert = ((1 + self.gated) * experts.intermediate + self.hidden) * experts.biases
        router = experts.count * (self.hidden + experts.choice_bias + experts.logit_bias)
        gate = self.hidden * experts.shared_gate
        return routed + shared + gate + visited * per_expert + router

    def _dense_parameters(self, width: int) -> int:
        """A feed-forward layer of this width, dense or shared; only routed experts have no biases."""
        biases = ((1 + self.gated) * width + self.hidden) * self.mlp_bias if width else 0
        return (2 + self.gated) * self.hidden * width + biases

    # -- FLOPs and bytes ----------------------------------------------------------------------

    def matmul_parameters(self) -> int:
        """Weights that a token is multiplied with: active ones less lookups, norms and biases."""
        total = self.vocab * self.hidden
        for layer in range(self.layers):
            total += self.mixer_shape(layer).matmul_parameters(self)
            experts = self.experts_of(layer)
            if experts is None:
                total += (2 + self.gated) * self.hidden * self.intermediate
            else:
                width = experts.per_token * experts.intermediate + experts.shared_intermediate
                total += (2 + self.gated) * self.hidden * width
                total += (experts.count + experts.shared_gate) * self.hidden
        return total

    def attention_flops(self, tokens: int, cached: int = 0) -> int:
        """q @ k and p @ v of `tokens` new tokens behind `cached` ones, causal and windowed; and of states."""
        total = 0
        for layer in range(self.layers):
            shape = self.mixer_shape(layer)
            total += shape.pair_flops(self) * _pairs(tokens, cached, self.window(layer))
            total += shape.token_flops(self) * tokens
        return total

    def forward_flops(self, tokens: int, cached: int = 0, logits: int | None = None) -> int:
        """FLOPs of a forward pass over a sequence; `logits` is the number of tokens with logits."""
        head = self.vocab * self.hidden
        rows = tokens if logits is None else logits
        body = 2 * (self.matmul_parameters() - head) * tokens
        return body + 2 * head * rows + self.attention_flops(tokens, cached)

    def training_flops(self, tokens: int, cached: int = 0) -> int:
        """Forward and backward over one sequence, without recomputation; `cached`: tokens before it, not computed."""
        return 3 * self.forward_flops(tokens, cached)


def _pairs(tokens: int, cached: int, window: int) -> int:
    """Number of (query, key) pairs under a causal mask, limited to `window` unless it is 0."""
    first, last = cached + 1, cached + tokens  # keys seen by the first and the last query
    everything = (first + last) * tokens // 2
    if not window or last <= window:
        return everything
    beyond = min(tokens, last - window)  # queries that see less than all before them
    excess_first = max(first - window, 1)
    return everything - (excess_first + last - window) * beyond // 2
