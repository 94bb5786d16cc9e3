"""Writes a trained model as a checkpoint: new tensors in a file of its own, the rest where cairn-tiny has them."""

import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, bfloat16

from cairn.models.checkpoint import Checkpoint
from cairn.models.checkpoint_names import source
from cairn.models.vision.names import tower_source

IMAGE = "<image>"
PLACEHOLDER = "<|pad|>"  # what cairn-tiny calls the token that stands for a row
PREFIXES = {"tower": "vision_tower.", "projector": "multi_modal_projector."}
TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- else -%}
        {%- for part in message['content'] or [] -%}
            {{- '<image>\\n' if part['type'] == 'image' else part['text'] -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def write_model(folder: Path, model: Any, base: Checkpoint, curve: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _new_tensors(model, base)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    beside = os.path.join("..", "cairn-tiny", "model.safetensors")
    where = dict.fromkeys(base.tensors.names(), beside) | dict.fromkeys(
        tensors, "model.safetensors"
    )
    _write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    _write(folder / "config.json", _config(model, base))
    _write(folder / "preprocessor_config.json", _preprocessor(model.tower.spec.tower.image))
    _write(folder / "curve.json", curve)
    _write(folder / "generation_config.json", {"eos_token_id": list(base.eos_ids)})
    write_tokenizer(folder, base)


def write_tokenizer(folder: Path, base: Checkpoint) -> None:
    """That of cairn-tiny, with another name for the token that stands for a row."""
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    told = (
        (base.path / "tokenizer.json")
        .read_text()
        .replace(json.dumps(PLACEHOLDER), json.dumps(IMAGE))
    )
    (folder / "tokenizer.json").write_text(told)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    _write(folder / "tokenizer_config.json", settings | {"image_token": IMAGE})


def _new_tensors(model: Any, base: Checkpoint) -> dict[str, Tensor]:
    """What was trained, under the names of the format."""
    found: dict[str, Tensor] = {}
    spec = model.tower.spec
    parameters = dict(model.tower.named_parameters())
    for slot in model.tower.slots():
        shape = spec.tower.shape
        part, place = tower_source(shape.family, spec.projector.kind, slot.name, shape.hidden)
        found[PREFIXES[part] + place.tensor] = parameters[slot.parameter][slot.index or ...]
    parameters = dict(model.text.named_parameters())
    for slot in model.text.slots():
        if parameters[slot.parameter].requires_grad:
            name = source(base.spec.family, slot.name).tensor
            found[name] = parameters[slot.parameter][slot.index or ...]
    return {
        name: tensor.detach().to("cpu", bfloat16).contiguous() for name, tensor in found.items()
    }


def _config(model: Any, base: Checkpoint) -> dict[str, Any]:
    spec = model.tower.spec
    shape = spec.tower.shape
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": "bfloat16",
        "image_token_index": spec.image_token,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": True,
        "text_config": base.config,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "image_size": spec.tower.image,
            "patch_size": spec.tower.patch,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": shape.norm_eps,
        },
    }


def _preprocessor(side: int) -> dict[str, Any]:
    return {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": side, "width": side},
        "resample": 3,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
