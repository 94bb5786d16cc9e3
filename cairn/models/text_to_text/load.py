"""A T5 out of a folder in Hugging Face's format."""

import re
from pathlib import Path

import torch
from torch import Tensor

from cairn.core.errors import UnsupportedModel, WeightsError
from cairn.models.hub import resolve
from cairn.models.runnable import RANDOM
from cairn.models.safetensors_file import SafetensorsFolder, read_json
from cairn.models.text_to_text.model import T5
from cairn.models.text_to_text.spec import is_text_to_text, t5_spec

OUTSIDE = {
    "embedding": "shared.weight",
    "encoder_norm.weight": "encoder.final_layer_norm.weight",
    "decoder_norm.weight": "decoder.final_layer_norm.weight",
    "encoder_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "decoder_bias": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "head": "lm_head.weight",
}
SAME = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # of `shared`, stored again
INSIDE = re.compile(r"(encoder|decoder)\.(\d+)\.([a-z_]+?)(_norm)?\.(?:([a-z]+)\.)?weight")


def stored_name(name: str, gated: bool) -> str:
    """The tensor of one of our parameters."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    match = INSIDE.fullmatch(name)
    if match is None:
        raise WeightsError(f"{name} is no parameter of a T5")
    stack, layer, part, norm, matrix = match.groups()
    last = 2 if stack == "decoder" else 1
    place = {"attention": 0, "look": 1, "feed_forward": last}[part]
    where = f"{stack}.block.{layer}.layer.{place}"
    if norm:
        return f"{where}.layer_norm.weight"
    if part == "feed_forward":
        gates = {"gate": "wi_0", "up": "wi_1" if gated else "wi", "down": "wo"}
        return f"{where}.DenseReluDense.{gates[matrix]}.weight"
    kind = "EncDecAttention" if part == "look" else "SelfAttention"
    return f"{where}.{kind}.{matrix}.weight"


def text_to_text_folder(model: str) -> Path | None:
    """Folder of a T5 model; None for other models."""
    if model.startswith(RANDOM):
        return None
    folder = resolve(model)
    config = folder / "config.json"
    return folder if config.is_file() and is_text_to_text(read_json(config)) else None


def load_t5(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> T5:
    config = read_json(folder / "config.json")
    if not is_text_to_text(config):
        raise UnsupportedModel(
            f"{folder}: model_type is {config.get('model_type')!r}, not t5",
            hint="T5 and its relatives of the same model_type are supported",
        )
    with torch.device("meta"):
        model = T5(t5_spec(config))
    tensors = SafetensorsFolder(folder)
    present, used = set(tensors.names()), set(SAME)
    filled: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        stored = stored_name(name, model.spec.gated)
        if name == "head" and stored not in present:
            stored = OUTSIDE["embedding"]
        if stored not in present or tensors.shape(stored) != tuple(parameter.shape):
            shape = list(tensors.shape(stored)) if stored in present else "nothing"
            raise WeightsError(
                f"{stored}: expected {list(parameter.shape)}, found {shape}",
                hint="the weights do not belong to this config.json",
            )
        used.add(stored)
        filled[name] = tensors.tensor(stored).to(device, dtype)
    if extra := sorted(present - used):
        raise WeightsError(
            f"{extra[0]} has no place in a T5", hint="config.json does not describe these weights"
        )
    model.load_state_dict(filled, assign=True)
    return model.requires_grad_(False).eval()
