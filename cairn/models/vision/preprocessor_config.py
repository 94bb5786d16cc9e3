"""Image preprocessing rules from the configuration files of a model.

A field of preprocessor_config.json that is not read is refused by name, as in `models.families`. No torch is needed
to follow the rules, only to read what stands beside tensors.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cairn.core.errors import UnsupportedModel
from cairn.models.config_fields import Fields
from cairn.models.safetensors_file import read_json
from cairn.models.vision.spec import VisionSpec
from cairn.models.vision.tiling_rules import ImageRules

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # numbers of Pillow
HARMLESS = {"image_processor_type", "feature_extractor_type", "processor_class", "auto_map"}
HARMLESS |= {"_processor_class", "data_format", "input_data_format", "device", "return_tensors"}
HARMLESS |= {"_valid_processor_keys", "return_row_col_info", "default_to_square", "do_pad"}
HARMLESS |= {"image_seq_length", "disable_grouping", "do_convert_rgb", "pad_size", "video_sampling"}


def read_rules(folder: Path, spec: VisionSpec) -> ImageRules:
    """Read preprocessor_config.json, or the equivalent part of processor_config.json."""

    config: dict[str, Any] = {}
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (path := folder / name).is_file():
            file = read_json(path)
            config = file.get("image_processor", file if name.startswith("pre") else config)
    if not config:
        raise UnsupportedModel(
            f"{folder} has no preprocessor_config.json, so pictures cannot be prepared",
            hint="copy it from the original checkpoint",
        )
    fields = Fields(config, "preprocessor_config.json")
    rules = READERS[spec.family](fields, spec)
    fields.seen |= HARMLESS
    fields.finish()
    return rules


def read_video_rules(folder: Path, spec: VisionSpec, pictures: ImageRules) -> ImageRules | None:
    """Read video_preprocessor_config.json; None if the model does not support videos."""
    if spec.video_token is None:
        return None
    config: dict[str, Any] = {}
    for name in ("processor_config.json", "video_preprocessor_config.json"):
        if (path := folder / name).is_file():
            file = read_json(path)
            config = file.get("video_processor", file if name.startswith("video") else config)
    size = {"shortest_edge": 128 * spec.cell**2, "longest_edge": 768 * spec.cell**2}
    size |= config.get("size") or {}
    return msgspec.structs.replace(
        pictures,
        least_pixels=config.get("min_pixels") or size["shortest_edge"],
        most_pixels=config.get("max_pixels") or size["longest_edge"],
        over_frames=spec.step_tokens is not None,
    )


def _common(fields: Fields, resample: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Any:
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not fields.take(name, bool, True):
            raise UnsupportedModel(
                f"preprocessor_config.json: {name} is false", hint="it has to be true"
            )
    factor = fields.take("rescale_factor", float, 1 / 255)
    if abs(factor * 255 - 1) > 1e-6:
        raise UnsupportedModel(
            f"preprocessor_config.json: rescale_factor is {factor}", hint="it has to be 1/255"
        )
    return {
        "resample": fields.take("resample", int, resample),
        "mean": tuple(fields.take_list("image_mean", float, list(mean))),
        "std": tuple(fields.take_list("image_std", float, list(std))),
    }


def _fixed(fields: Fields, spec: VisionSpec) -> ImageRules:
    is_clip = spec.tower.class_token
    resample = BILINEAR if spec.family == "gemma3" else BICUBIC
    common = _common(fields, resample, *((CLIP_MEAN, CLIP_STD) if is_clip else (HALF, HALF)))
    side = spec.tower.image
    size = fields.take("size", (dict, int), {"height": side, "width": side})
    crops = fields.take("do_center_crop", bool, is_clip)
    crop = fields.take("crop_size", (dict, int), {"height": side, "width": side})
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    if isinstance(size, int):
        size = {"shortest_edge": size}
    shortest = size.get("shortest_edge", 0)
    shape = crop if crops else size
    if fields.config.get("do_pad") or (shortest and not crops):
        raise UnsupportedModel(
            "preprocessor_config.json: pictures are padded, or keep their shape",
            hint="pictures of one size, or cropped to one, are supported",
        )
    if (shape.get("height"), shape.get("width")) != (side, side):
        raise UnsupportedModel(
            f"preprocessor_config.json: pictures of {shape}, and a tower for {side} x {side}",
            hint="the two have to be the same",
        )
    return ImageRules("fixed", side, side, shortest=shortest, **common)


def _tiles(fields: Fields, spec: VisionSpec) -> ImageRules:
    common = _common(fields, LANCZOS, HALF, HALF)
    side = fields.take("max_image_size", dict, {"longest_edge": 364}).get("longest_edge", 0)
    longest = fields.take("size", dict, {"longest_edge": 4 * 364}).get("longest_edge", 0)
    splits = fields.take("do_image_splitting", bool, True)
    if side != spec.tower.image:
        raise UnsupportedModel(
            f"preprocessor_config.json: tiles of {side} pixels, and a tower for {spec.tower.image}",
            hint="the two have to be the same",
        )
    if not splits:
        return ImageRules("fixed", side, side, **common)
    return ImageRules("tiled", side, side, longest=longest, **common)


def _patches(fields: Fields, spec: VisionSpec) -> ImageRules:
    common = _common(fields, BICUBIC, CLIP_MEAN, CLIP_STD)
    size = fields.take("size", dict, {"longest_edge": 1024})
    most = size.get("longest_edge", 0)
    fields.take("patch_size", (dict, int), spec.tower.patch)  # the processor goes by the tower's
    height, width = most or size.get("height", 0), most or size.get("width", 0)
    cell = spec.tower.patch * spec.projector.merge
    return ImageRules("patches", height, width, cell=cell, **common)


def _gemma3(fields: Fields, spec: VisionSpec) -> ImageRules:
    if fields.take("do_pan_and_scan", bool, False):
        raise UnsupportedModel(
            "preprocessor_config.json: do_pan_and_scan is true",
            hint="set it to false: whole pictures are supported",
        )
    fields.seen |= {f"pan_and_scan_{name}" for name in PAN_AND_SCAN}
    return _fixed(fields, spec)


def _area(fields: Fields, spec: VisionSpec) -> ImageRules:
    common = _common(fields, BICUBIC, CLIP_MEAN, CLIP_STD)
    size = fields.take("size", dict, {})
    least = fields.take("min_pixels", int, size.get("shortest_edge", 56 * 56))
    most = fields.take("max_pixels", int, size.get("longest_edge", 28 * 28 * 1280))
    fields.seen |= {"min_pixels", "max_pixels"}
    for name, limit in (
        ("patch_size", spec.tower.patch),
        ("merge_size", spec.projector.merge),
        ("temporal_patch_size", spec.tower.frames),
    ):
        configured = fields.take(name, int, limit)
        if configured != limit:
            raise UnsupportedModel(
                f"preprocessor_config.json: {name} is {configured}, and the tower's is {limit}",
                hint="the two have to be the same",
            )
    if not 0 < least <= most:
        raise UnsupportedModel(
            f"preprocessor_config.json: pictures of {least} to {most} pixels",
            hint="min_pixels is above 0, and max_pixels is not less",
        )
    return ImageRules("area", 0, 0, cell=spec.cell, least_pixels=least, most_pixels=most, **common)


PAN_AND_SCAN = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
READERS: dict[str, Callable[[Fields, VisionSpec], ImageRules]] = {
    "llava": _fixed,
    "paligemma": _fixed,
    "gemma3": _gemma3,
    "pixtral": _patches,
    "idefics3": _tiles,
    "qwen2_vl": _area,
    "qwen2_5_vl": _area,
    "qwen3_vl": _area,
}
