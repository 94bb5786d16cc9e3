"""An EAGLE-3 head: one layer that guesses tokens from what the target model computes anyway (arXiv:2503.01840).

    hidden states behind three layers of the target -fc-> g        token behind each -embedding-> x
    [norm(x), norm(g)] -one layer, keys of its own-> h -norm-> scores of a smaller vocabulary -d2t-> the token after

The head continues by itself: h takes the place of g for the token that it guessed. Two formats of files are read, that
of the original repository (`midlayer.*`) and that of speculators (`layers.0.*`); in both, `d2t` holds what is to be
added to a number of the smaller vocabulary. Layers are counted as there: hidden states j are what enters layer j.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from cairn.core.errors import ConfigError
from cairn.models.attend import Attend
from cairn.models.build import ModelBuild, Slot, SlotModule
from cairn.models.families import from_hf
from cairn.models.family_config import config_of
from cairn.models.layer_loop import PlainStep
from cairn.models.layers import Norm
from cairn.models.linear.maps import ColumnParallelLinear, RowParallelLinear, Vocabulary
from cairn.models.safetensors_file import SafetensorsFolder, TensorSource, read_json, write_tensors
from cairn.models.shards import ALONE
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Layer, rotations_of

WEIGHTS = "model.safetensors"
DRAFT_VOCABULARY = 32000  # of a head with random weights
LEAST_LAYERS = 7  # of a target whose usual taps are three different layers
FILE_NAMES = {  # of a layer's tensors, behind `midlayer` or `layers.0`
    "attention_norm": "input_layernorm",
    "attention.qkv.q": "self_attn.q_proj",
    "attention.qkv.k": "self_attn.k_proj",
    "attention.qkv.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.inner.gate": "mlp.gate_proj",
    "feed_forward.inner.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
LAYER_FIELDS = (  # of a configuration that describe the layer
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",  # both, as transformers writes them since version 5
    "max_position_embeddings",
    "hidden_act",
    "vocab_size",
    "attention_bias",
)


class EagleSpec(msgspec.Struct, frozen=True):
    layer: ModelSpec  # of the one layer, with the target's vocabulary
    taps: tuple[int, ...]  # layers of the target behind which hidden states are taken
    target_hidden: int
    draft_vocab: int
    norm_before_residual: bool = False


def is_eagle(config: Mapping[str, Any]) -> bool:
    named = " ".join(map(str, config.get("architectures") or []))
    return config.get("speculators_model_type") == "eagle3" or "Eagle3" in named


def eagle_spec(config: Mapping[str, Any], target: ModelSpec) -> EagleSpec:
    """Read the spec from the config.json of either format."""
    described = config.get("transformer_layer_config") or config
    fields = {name: described[name] for name in LAYER_FIELDS if described.get(name) is not None}
    layer = from_hf({"model_type": "llama", "num_hidden_layers": 1} | fields)
    inner = config.get("eagle_config") or {}
    numbers = config.get("eagle_aux_hidden_state_layer_ids") or inner.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    numbers = numbers or (2, target.layers // 2, target.layers - 3)
    draft_vocab = config.get("draft_vocab_size") or described.get("draft_vocab_size")
    spec = EagleSpec(
        layer,
        tuple(int(number) - 1 for number in numbers),
        int(config.get("target_hidden_size") or layer.hidden),
        int(draft_vocab or layer.vocab),
        bool(config.get("norm_before_residual", False)),
    )
    _check(config, spec, target)
    return spec


def random_spec(target: ModelSpec) -> EagleSpec:
    """A head in the shape of the target's layers, as one that is to be trained."""
    layer = msgspec.structs.replace(
        target, family="llama", layers=1, windows=(), qk_norm=False, qkv_bias=False, tied=False
    )
    taps = (1, target.layers // 2 - 1, target.layers - 4)
    if target.layers < LEAST_LAYERS:
        taps = (0, target.layers // 2, target.layers - 1)
    return EagleSpec(layer, taps, target.hidden, min(DRAFT_VOCABULARY, target.vocab))


class DraftPass(NamedTuple):
    """Result of a pass of a draft head."""

    h_TD: Tensor  # takes the place of the hidden states in the next pass
    normed_TD: Tensor  # for the scores


class EagleHead(nn.Module):
    def __init__(self, spec: EagleSpec, build: ModelBuild, number: int) -> None:
        """`number`: of its layer in the cache, behind those of the target."""
        super().__init__()
        build, layer = build._replace(shards=ALONE), spec.layer
        self.spec = spec
        self.fc = RowParallelLinear(
            build, len(spec.taps) * spec.target_hidden, layer.hidden, bias=False
        )
        self.hidden_norm = Norm(build, layer, layer.hidden)
        self.layer = Layer(build, layer, 0)
        attention = self.layer.attention
        attention.qkv = ColumnParallelLinear(
            build, 2 * layer.hidden, attention.qkv.parts, layer.qkv_bias
        )
        attention.plain_rule = msgspec.structs.replace(attention.plain_rule, layer=number)
        self.norm = Norm(build, layer, layer.hidden)
        self.head = Vocabulary(build, spec.draft_vocab, layer.hidden)
        self.embedding: Vocabulary | None = None  # its own; None: the target's
        blank = torch.zeros(spec.draft_vocab, dtype=torch.int64, device=build.device)
        self.register_buffer("d2t", blank)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.spec.taps

    def fuse(self, tapped: list[Tensor]) -> Tensor:
        return self.fc(torch.cat(tapped, -1))

    def forward(
        self, x_TD: Tensor, g_TD: Tensor, step: PlainStep, ends_B: Tensor | None = None
    ) -> Tensor:
        """`x_TD`: embedded tokens, each the one behind the hidden state at its place. `ends_B`: those wanted."""
        layer, normed_TD = self.layer, self.hidden_norm(g_TD)
        residual_TD = normed_TD if self.spec.norm_before_residual else g_TD
        both_TD = torch.cat((layer.attention_norm(x_TD), normed_TD), -1)
        h_TD = residual_TD + layer.attention.plain(both_TD, step)
        h_TD = h_TD if ends_B is None else h_TD[ends_B]
        return h_TD + layer.feed_forward.plain(layer.feed_forward_norm(h_TD), step)

    def logits(self, h_TD: Tensor) -> Tensor:
        """Over the smaller vocabulary."""
        return self.head.logits(self.norm(h_TD))

    def passed(
        self,
        x_TD: Tensor,
        g_TD: Tensor,
        positions_T: Tensor,
        attend: Attend,
        ends_B: Tensor | None = None,
    ) -> DraftPass:
        rotations = rotations_of(self.spec.layer, range(1), positions_T, attend, x_TD.dtype)
        h_TD = self(x_TD, g_TD, PlainStep(attend, rotations), ends_B)
        return DraftPass(h_TD, self.norm(h_TD))

    def likeliest(self, normed_TD: Tensor) -> Tensor:
        """Most likely tokens as ids of the target model, int32."""
        found_T = self.head.logits(normed_TD).argmax(-1)
        return (found_T + self.d2t[found_T]).int()

    def guessed(self, normed_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest of the target's tokens, and the chance of each among those that the head knows."""
        chance_T, found_T = self.head.logits(normed_TD).softmax(-1).max(-1)
        return (found_T + self.d2t[found_T]).int(), chance_T

    def slots(self) -> list[Slot]:
        own_slots = []
        for path, module in self.named_modules():
            if isinstance(module, SlotModule):
                own_slots += [slot.under(path) for slot in module.slots()]
        return own_slots


def load_head(folder: Path, target: ModelSpec, build: ModelBuild) -> EagleHead:
    spec = eagle_spec(read_json(folder / "config.json"), target)
    tensors = SafetensorsFolder(folder)
    head = EagleHead(spec, build, target.layers)
    names = set(tensors.names())
    own = "embed_tokens.weight" in names
    if own:
        head.embedding = Vocabulary(build._replace(shards=ALONE), target.vocab, spec.layer.hidden)
    elif spec.layer.hidden != target.hidden:
        raise ConfigError(
            f"the head in {folder} has no embeddings and is {spec.layer.hidden} wide, the model {target.hidden}",
            hint="is it a head for this model?",
        )
    _fill(head, tensors, "midlayer" if "midlayer.self_attn.q_proj.weight" in names else "layers.0")
    if "d2t" in names:
        head.d2t.copy_(_checked_d2t(tensors.tensor("d2t"), spec, target))
    elif spec.draft_vocab != target.vocab:
        raise ConfigError(
            f"the head in {folder} knows {spec.draft_vocab} of {target.vocab} tokens, and has no d2t",
            hint="d2t says which tokens of the model those are",
        )
    return head.requires_grad_(False)


def random_head(target: ModelSpec, build: ModelBuild, spec: EagleSpec | None = None) -> EagleHead:
    """Random head for measurements or as a start for training. `spec` None takes the shape of the target's layers."""
    head = EagleHead(spec or random_spec(target), build, target.layers)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02)
    return head.requires_grad_(False)


def save_head(head: EagleHead, folder: Path, vocabulary: int, verifier: str = "") -> None:
    """Save a head in the format of the speculators library."""
    parameters = dict(head.named_parameters())
    tensors = {
        _file_name(slot.name, "layers.0"): parameters[slot.parameter][slot.index].detach().cpu()
        for slot in head.slots()
    }
    known_K = torch.arange(head.spec.draft_vocab) + head.d2t.cpu()
    known_V = torch.zeros(vocabulary, dtype=torch.bool)
    known_V[known_K] = True
    tensors |= {"d2t": head.d2t.cpu(), "t2d": known_V}
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    config = eagle_config(head.spec, vocabulary, verifier)
    (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)) + b"\n")


def eagle_config(spec: EagleSpec, vocabulary: int, verifier: str) -> dict[str, Any]:
    layer = msgspec.structs.replace(spec.layer, vocab=vocabulary, family="llama")
    described = {"vocab_size": vocabulary} | config_of(layer)
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": described,
        "draft_vocab_size": spec.draft_vocab,
        "target_hidden_size": spec.target_hidden,
        "norm_before_residual": spec.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in spec.taps],
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3},
            ],
            "verifier": {"name_or_path": verifier},
        },
    }


def _fill(head: EagleHead, tensors: TensorSource, layer: str) -> None:
    parameters = dict(head.named_parameters())
    for slot in head.slots():
        name = _file_name(slot.name, layer)
        if name not in tensors.names():
            raise ConfigError(f"the head has no {name}", hint="it is not an EAGLE-3 head")
        tensor = tensors.tensor(name)
        if tuple(tensor.shape) != slot.shape:
            raise ConfigError(
                f"{name} of the head is {tuple(tensor.shape)}, its configuration says {slot.shape}",
                hint="configuration and weights do not belong together",
            )
        with torch.no_grad():
            parameters[slot.parameter][slot.index].copy_(tensor)


def _checked_d2t(d2t_K: Tensor, spec: EagleSpec, target: ModelSpec) -> Tensor:
    """Every guess is looked up in the model's embedding, so none may lie outside of it."""
    if d2t_K.shape != (spec.draft_vocab,):
        raise ConfigError(
            f"d2t of the head has {d2t_K.numel()} entries, its configuration says {spec.draft_vocab} tokens",
            hint="configuration and weights do not belong together",
        )
    tokens_K = torch.arange(spec.draft_vocab) + d2t_K
    wrong_K = tokens_K[(tokens_K < 0) | (tokens_K >= target.vocab)]
    if len(wrong_K):
        raise ConfigError(
            f"the head guesses token {int(wrong_K[0])}, the model has {target.vocab}",
            hint="is it a head for this model?",
        )
    return d2t_K


def _file_name(name: str, layer: str) -> str:
    path, _, kind = name.rpartition(".")
    if path.startswith("layer."):
        return f"{layer}.{FILE_NAMES[path.removeprefix('layer.')]}.{kind}"
    fixed = {"hidden_norm": f"{layer}.hidden_norm", "head": "lm_head", "embedding": "embed_tokens"}
    return f"{fixed.get(path, path)}.{kind}"


def _check(config: Mapping[str, Any], spec: EagleSpec, target: ModelSpec) -> None:
    unread = [name for name in ("norm_before_fc", "fc_norm", "norm_output") if config.get(name)]
    if unread:
        raise ConfigError(f"the head has {unread[0]}", hint="such heads are not supported yet")
    if spec.target_hidden != target.hidden:
        raise ConfigError(
            f"the head reads hidden states {spec.target_hidden} wide, those of the model are {target.hidden} wide",
            hint="is it a head for this model?",
        )
    if spec.layer.vocab != target.vocab:
        raise ConfigError(
            f"the head was made for a vocabulary of {spec.layer.vocab} tokens, the model has {target.vocab}",
            hint="is it a head for this model?",
        )
    # Hidden states come in the order of the layers, each once.
    if list(spec.taps) != sorted(set(spec.taps)):
        raise ConfigError(
            f"the head reads what enters layers {[tap + 1 for tap in spec.taps]}, which do not ascend",
            hint="eagle_aux_hidden_state_layer_ids names each once, in order",
        )
    if not all(0 <= tap < target.layers for tap in spec.taps):
        raise ConfigError(
            f"the head reads what enters layers {[tap + 1 for tap in spec.taps]}, the model has {target.layers}",
            hint="is it a head for this model?",
        )
    layer = spec.layer
    if (layer.kv_heads, layer.head_dim) != (target.kv_heads, target.head_dim):
        raise ConfigError(
            f"the head keeps {layer.kv_heads} heads of {layer.head_dim} columns, the model {target.kv_heads} of "
            f"{target.head_dim}",
            hint="they share pages, so they have to be alike",
        )
