"""Small dense layers behind a pooled state: the head of a classifier or reranker, and projections of embeddings.

    BERT          tanh(dense(cls)) -> classifier            RoBERTa   tanh(dense(cls)) -> out_proj
    ModernBERT    norm(gelu(dense(cls | mean))) -> classifier
    decoders      score(last)                               rerankers that answer yes or no: two rows of the head
    2_Dense, ...  of sentence-transformers

They run on the host, on vectors that the engine has pooled: a thousandth of the model's own work.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.core.errors import UnsupportedModel, WeightsError
from cairn.models.config_fields import Fields
from cairn.models.cpu_half_precision import linear
from cairn.models.encoder.load import prefix_of
from cairn.models.encoder.spec import Classifier, EncoderSpec
from cairn.models.safetensors_file import SafetensorsFolder, TensorSource, read_json

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


class Dense(NamedTuple):
    """activation(x @ weight.T + bias), and a norm behind it where there is one."""

    weight_ND: Tensor
    bias_N: Tensor | None = None
    activation: str = "identity"
    norm_N: Tensor | None = None
    norm_bias_N: Tensor | None = None
    norm_eps: float = 0.0

    def __call__(self, x_BD: Tensor) -> Tensor:
        y_BN = ACTIVATIONS[self.activation](linear(x_BD, self.weight_ND, self.bias_N))
        if self.norm_N is None:
            return y_BN
        return F.layer_norm(y_BN, self.norm_N.shape, self.norm_N, self.norm_bias_N, self.norm_eps)


class Head(NamedTuple):
    """Dense layers, one after another, in float32."""

    layers: Sequence[Dense]

    @property
    def width(self) -> int:
        """Width of the output; 0 for the model's hidden states."""
        return self.layers[-1].weight_ND.shape[0] if self.layers else 0

    def __call__(self, x_BD: Tensor) -> Tensor:
        with torch.inference_mode():
            for layer in self.layers:
                x_BD = layer(x_BD)
            return x_BD


def classifier_head(spec: EncoderSpec, tensors: TensorSource) -> Head:
    """Head of an encoder with a `classifier`."""
    family = spec.shape.family
    take = _Taker(tensors)
    if family == "roberta":
        return Head(
            [take.dense("classifier.dense", "tanh"), take.dense("classifier.out_proj")],
        )
    if family == "modernbert":
        dense = take.dense("head.dense", "gelu")._replace(
            norm_N=take("head.norm.weight"),
            norm_bias_N=take("head.norm.bias") if spec.norm_bias else None,
            norm_eps=spec.shape.norm_eps,
        )
        return Head([dense, take.dense("classifier")])
    pooler = take.dense(f"{prefix_of(tensors, family)}pooler.dense", "tanh")
    return Head([pooler, take.dense("classifier")])


def decoder_head(tensors: TensorSource) -> Head:
    """Head of a decoder with `ForSequenceClassification` in its architecture."""
    return Head([_Taker(tensors).dense("score")])


def yes_no_head(tensors: TensorSource, yes: int, no: int | None) -> Head:
    """The log-odds of two answers: two rows of the output projection, as one."""
    names = set(tensors.names())
    head = "lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight"
    rows_VD = tensors.tensor(head)
    weight_D = rows_VD[yes].float()
    if no is not None:
        weight_D = weight_D - rows_VD[no].float()
    return Head([Dense(weight_D[None])])


def dense_module(folder: Path) -> Dense:
    """A `Dense` module of sentence-transformers, from its folder."""
    fields = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
    take = _Taker(SafetensorsFolder(folder))
    named = fields.take("activation_function", str, "torch.nn.modules.linear.Identity")
    activation = named.rpartition(".")[2].lower()
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(
            f"{folder}: activation_function is {named!r}", hint=f"one of {', '.join(ACTIVATIONS)}"
        )
    return take.dense("linear", activation)


def probabilities(classifier: Classifier, logits_BL: Tensor) -> Tensor:
    """Probabilities of labels: softmax for a single label, sigmoid for independent labels."""
    if classifier.problem == "single_label_classification":
        return logits_BL.softmax(-1)
    return logits_BL.sigmoid() if classifier.problem != "regression" else logits_BL


class _Taker:
    """Tensors by name, in float32; one that is missing is named."""

    def __init__(self, tensors: TensorSource) -> None:
        self.tensors, self.names = tensors, set(tensors.names())

    def __call__(self, name: str) -> Tensor:
        if name not in self.names:
            raise WeightsError(
                f"the checkpoint has no tensor {name}",
                hint="its architecture says that it scores whole texts: is the download complete?",
            )
        return self.tensors.tensor(name).float()

    def dense(self, path: str, activation: str = "identity") -> Dense:
        bias = f"{path}.bias"
        return Dense(self(f"{path}.weight"), self(bias) if bias in self.names else None, activation)
