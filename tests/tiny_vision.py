"""Tiny random checkpoints of models that see, written by `transformers`, the oracle, with tokenizers of bytes."""

import functools
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEXT: dict[str, Any] = dict(
    model_type="llama", vocab_size=320, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
    num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=640,
    bos_token_id=None, eos_token_id=301, pad_token_id=None,
)  # fmt: skip
VISION: dict[str, Any] = dict(
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=3,
    num_attention_heads=2,
    image_size=28,
    patch_size=7,
)
IMAGE_TOKEN, VIDEO_TOKEN = 300, 299
VIDEO = "<unused_298><unused_299><unused_297>"  # start, a placeholder, end: as templates of Qwen-VL write them
TAGS = [f"<row_{y}_col_{x}>" for y in range(1, 7) for x in range(1, 7)][:14]
MARKS = ["<end>", "[IMG_BREAK]", "[IMG_END]", "<fake_token_around_image>", "<global-img>", *TAGS]
PLACEHOLDERS = {"pixtral": "[IMG]", "mistral3": "[IMG]", "gemma3": f"<unused_{IMAGE_TOKEN - 1}>"}
FAMILIES = (
    "llava",
    "llava-siglip",
    "pixtral",
    "idefics3",
    "smolvlm",
    "gemma3",
    "paligemma",
    "mistral3",
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
)
GEMMA: dict[str, Any] = TEXT | {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "sliding_window": 24,
}
# M-RoPE: 8 pairs of columns of a head, by frame, row and column.
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
QWEN: dict[str, Any] = {key: TEXT[key] for key in TEXT if key not in ("model_type", "head_dim")}
QWEN |= {"hidden_size": 96, "rope_parameters": ROPE, "sliding_window": None}
QWEN_TOWER: dict[str, Any] = dict(depth=3, num_heads=2, patch_size=7)


def _qwen_config(name: str) -> transformers.PreTrainedConfig:
    marks = {"image_token_id": IMAGE_TOKEN, "video_token_id": 299, "vision_start_token_id": 298}
    marks |= {"vision_end_token_id": 297}
    if name == "qwen2-vl":
        tower = QWEN_TOWER | {"embed_dim": 40, "hidden_size": 96, "mlp_ratio": 2}
        return transformers.Qwen2VLConfig(vision_config=tower, text_config=QWEN, **marks)
    tower = QWEN_TOWER | {"hidden_size": 40, "intermediate_size": 56, "out_hidden_size": 96}
    if name == "qwen2.5-vl":
        tower |= {"window_size": 28, "fullatt_block_indexes": [1]}
        return transformers.Qwen2_5_VLConfig(vision_config=tower, text_config=QWEN, **marks)
    tower |= {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]}
    text = QWEN | {"head_dim": 16, "rope_parameters": ROPE | {"mrope_interleaved": True}}
    text.pop("sliding_window")
    return transformers.Qwen3VLConfig(vision_config=tower, text_config=text, **marks)


def _config(name: str) -> transformers.PreTrainedConfig:
    if name in ("idefics3", "smolvlm"):
        kind = transformers.Idefics3Config if name == "idefics3" else transformers.SmolVLMConfig
        return kind(
            vision_config=VISION | {"hidden_act": "gelu_pytorch_tanh"},
            text_config=TEXT | {"rms_norm_eps": 1e-5},
            image_token_id=IMAGE_TOKEN,
            scale_factor=2,
        )
    if name.startswith("qwen"):
        return _qwen_config(name)
    siglip = VISION | {"model_type": "siglip_vision_model"}
    if name == "gemma3":
        marks = {"boi_token_index": IMAGE_TOKEN - 1, "eoi_token_index": IMAGE_TOKEN - 2}
        text = GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}
        text["model_type"] = "gemma3_text"
        return transformers.Gemma3Config(
            text_config=text,
            vision_config=siglip,
            mm_tokens_per_image=4,
            image_token_index=IMAGE_TOKEN,
            **marks,
        )
    if name == "paligemma":
        text = {key: GEMMA[key] for key in (*TEXT, "hidden_activation")} | {"model_type": "gemma"}
        return transformers.PaliGemmaConfig(
            vision_config=siglip,
            text_config=text,
            image_token_index=IMAGE_TOKEN,
            projection_dim=48,
            hidden_size=48,
        )
    if name == "mistral3":
        vision = VISION | {"model_type": "pixtral", "image_size": 70, "hidden_act": "silu"}
        text = TEXT | {"model_type": "mistral", "sliding_window": None}
        return transformers.Mistral3Config(
            vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN
        )
    kinds = {"llava": "clip_vision_model", "llava-siglip": "siglip_vision_model"}
    rest = {} if name == "llava" else {"vision_feature_layer": -1}
    rest |= {} if name == "llava" else {"vision_feature_select_strategy": "full"}
    text = TEXT | ({"model_type": "qwen3"} if name == "llava-siglip" else {})
    text |= {"model_type": "mistral", "sliding_window": None} if name == "pixtral" else {}
    vision = VISION | {"model_type": kinds.get(name, name)}
    if name == "pixtral":
        vision |= {"image_size": 70, "hidden_act": "silu"}
    return transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, **rest
    )


@functools.cache
def reference(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(len(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForImageTextToText.from_config(
            _config(name), attn_implementation="eager"
        )
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3)
            parameter.add_(noise)  # large enough to make the logits differ
    return model.float().eval()


def image_processor(name: str) -> Any:
    """The oracle's, with its Pillow backend."""
    side = {"height": 28, "width": 28}
    match name:
        case "llava":
            from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

            return CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=side)
        case "gemma3":
            from transformers.models.gemma3.image_processing_pil_gemma3 import (
                Gemma3ImageProcessorPil,
            )

            return Gemma3ImageProcessorPil(size=side)
        case "qwen2-vl" | "qwen2.5-vl" | "qwen3-vl":
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
                Qwen2VLImageProcessorPil,
            )

            area = {"shortest_edge": 28 * 28, "longest_edge": 56 * 70}
            return Qwen2VLImageProcessorPil(size=area, patch_size=7)
        case "llava-siglip" | "paligemma":
            from transformers.models.siglip.image_processing_pil_siglip import (
                SiglipImageProcessorPil,
            )

            return SiglipImageProcessorPil(size=side)
        case "pixtral" | "mistral3":
            from transformers.models.pixtral.image_processing_pil_pixtral import (
                PixtralImageProcessorPil,
            )

            patch = 14 if name == "mistral3" else 7  # its processor multiplies by the merge
            return PixtralImageProcessorPil(size={"longest_edge": 70}, patch_size=patch)
        case _:
            from transformers.models.idefics3.image_processing_pil_idefics3 import (
                Idefics3ImageProcessorPil,
            )

            sizes = {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}}
            return Idefics3ImageProcessorPil(**sizes)


def tokenizer(name: str) -> Tokenizer:
    """A byte each, and the marks of all families behind them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fill = [f"<unused_{at}>" for at in range(len(letters), IMAGE_TOKEN)]
    row = "<row>" if name == "gemma3" else PLACEHOLDERS.get(name, "<image>")
    made.add_special_tokens([*fill, row, *MARKS])
    return made


def features(name: str, given: Any) -> dict[str, Any]:
    """What the tower of the oracle takes."""
    kept = ("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw")
    return {key: value for key, value in given.items() if key in kept}


def token_types(name: str, ids: list[int]) -> dict[str, Any]:
    """What the oracle wants to know about the tokens of a prompt with pictures."""
    shown = torch.tensor([[int(id == IMAGE_TOKEN) for id in ids]])
    if name == "gemma3":
        return {"token_type_ids": shown}
    if name == "paligemma":
        return {"token_type_ids": torch.zeros_like(shown)}
    return {"mm_token_type_ids": shown} if name.startswith("qwen") else {}


@functools.cache
def folder(name: str) -> Path:
    path = Path(_root().name) / name
    reference(name).save_pretrained(path)
    tokenizer(name).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    image_processor(name).save_pretrained(path)
    placeholder = PLACEHOLDERS.get(name, "<image>")
    (path / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
        "{{ '("
        + placeholder
        + f")' if part.type == 'image' else '{VIDEO}' if part.type == 'video' else part.text }}}}"
        "{% endfor %}{{ '\\n' }}{% endfor %}"
    )
    size = {"shortest_edge": 28 * 28, "longest_edge": 70 * 98 * (6 if name == "qwen3-vl" else 1)}
    (path / "video_preprocessor_config.json").write_text(json.dumps({"size": size}))
    return path


def video_features(name: str, video: Any, fps: float) -> dict[str, Any]:
    """A prepared video as the oracle's processor hands it on; that one itself needs torchvision."""
    rules = image_processor(name)
    pixels = (torch.from_numpy(video.array().copy()) / 255).sub(torch.tensor(rules.image_mean))
    pixels = pixels / torch.tensor(rules.image_std)
    pixels = torch.cat((pixels, pixels[-1:])) if len(pixels) % 2 else pixels
    steps, tall, wide = len(pixels) // 2, video.height // 7, video.width // 7
    x = pixels.permute(0, 3, 1, 2).reshape(steps, 2, 3, tall // 2, 2, 7, wide // 2, 2, 7)
    x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(steps * tall * wide, -1)
    found = {"pixel_values_videos": x, "video_grid_thw": torch.tensor([[steps, tall, wide]])}
    return found | ({"second_per_grid_ts": torch.tensor([2 / fps])} if name == "qwen2.5-vl" else {})


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-vision-")


def photograph(width: int, height: int, seed: int = 0) -> Any:
    """Something that is smooth in places and rough in others, as photographs are."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / draw.uniform(3, 30) + y / draw.uniform(3, 30)) for _ in range(3)]
    pixels = np.stack(waves, -1) * 90 + 128 + draw.normal(0, 12, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
