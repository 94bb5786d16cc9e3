"""Pictures in: pixels, prompts, rows of the tower and logits are those of transformers, family by family."""

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="pictures are decoded by Pillow")
import tiny_vision as tiny

from cairn.core.errors import UnsupportedModel
from cairn.models.attend import PackedDocuments
from cairn.models.checkpoint import open_checkpoint
from cairn.models.families import from_hf
from cairn.models.safetensors_file import read_json
from cairn.models.vision.families import REFUSED, split_config
from cairn.models.vision.names import part_of
from cairn.models.vision.picture import Picture, prepare_image
from cairn.models.vision.prompt import placeholders_of
from cairn.models.vision.tower import patches_of
from cairn.serve.engine.media import pieces_of
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.spans import axes_offsets, reaches_of
from cairn.serve.engine.step import Chunk
from cairn.serve.engine.tower_runner import TowerRunner

SIZES = [(28, 28), (61, 40), (33, 97), (200, 31)]


def prepared(name: str, size: tuple[int, int], seed: int = 0) -> Picture:
    rules = open_checkpoint(tiny.folder(name)).image_rules()
    assert rules is not None
    return prepare_image(tiny.photograph(*size, seed), rules)


def theirs(name: str, size: tuple[int, int], seed: int = 0) -> dict:
    return tiny.image_processor(name)(tiny.photograph(*size, seed), return_tensors="pt")


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_pixels_are_those_of_transformers(name, size):
    picture, wanted = prepared(name, size), theirs(name, size)["pixel_values"].numpy()
    rules = open_checkpoint(tiny.folder(name)).image_rules()
    ours = (picture.array() / np.float32(255) - np.float32(rules.mean)) / np.float32(rules.std)
    ours = ours.transpose(0, 3, 1, 2)
    if name.startswith("qwen"):  # theirs are cut into patches, cell by cell, and repeated in time
        _, _, height, width = ours.shape
        cut = ours[0].reshape(3, height // 14, 2, 7, width // 14, 2, 7)
        cut = cut.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        ours = np.repeat(cut, 2, axis=5).reshape(len(wanted), -1)
    np.testing.assert_allclose(ours, wanted.reshape(ours.shape), atol=2e-6)


@torch.inference_mode()
def test_rows_are_those_of_transformers():
    """Pictures of several sizes in one call: each comes out as if it were alone."""
    for name in tiny.FAMILIES:
        checkpoint = open_checkpoint(tiny.folder(name))
        tower, rules = checkpoint.load_tower("cpu", torch.float32), checkpoint.image_rules()
        runner = TowerRunner(tower, rules, lambda row, rows: None)
        rows = runner.rows([prepared(name, size, at) for at, size in enumerate(SIZES)])
        for at, (size, rows_RD) in enumerate(zip(SIZES, rows, strict=True)):
            given = theirs(name, size, at)
            found = tiny.reference(name).get_image_features(**tiny.features(name, given))
            wanted = torch.cat(list(found.pooler_output))
            if name == "qwen3-vl":
                deep = (torch.cat(list(plane)) for plane in found.deepstack_features)
                wanted = torch.cat((wanted, *deep), dim=-1)
            torch.testing.assert_close(rows_RD, wanted, atol=2e-4, rtol=0)


def prompt_of(name: str, pictures: list[Picture]) -> tuple[str, list[int]]:
    vision = open_checkpoint(tiny.folder(name)).vision
    places = placeholders_of(vision, open_checkpoint(tiny.folder(name)).tokenizer())
    text = " and ".join(f"see {places.mark}" for _ in pictures)
    whole = places.expanded(text, pictures)
    ids = tiny.tokenizer(name).encode(whole, add_special_tokens=False).ids
    spans = places.spans(ids, pictures)
    flat = [at for runs in spans for run in runs for at in run]
    assert flat == [at for at, id in enumerate(ids) if id == tiny.IMAGE_TOKEN]
    return whole, ids


@pytest.mark.parametrize("size", [(28, 28), (61, 40)], ids=str)
def test_prompts_are_those_of_transformers(size):
    """Of Idefics 3, whose rows and columns are marked; Pixtral's processor needs torchvision."""
    whole, _ = prompt_of("idefics3", [prepared("idefics3", size)])
    fast = transformers_tokenizer("idefics3")
    from transformers import Idefics3Processor

    image = tiny.photograph(*size)
    processor = Idefics3Processor(tiny.image_processor("idefics3"), fast, image_seq_len=4)
    ids = processor(images=[image], text="see <image>", add_special_tokens=False)["input_ids"][0]
    assert fast.encode(whole, add_special_tokens=False) == ids


def transformers_tokenizer(name: str):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer(name), eos_token="<end>")


def test_lines_of_pixtral_end_with_marks():
    whole, _ = prompt_of("pixtral", [prepared("pixtral", (21, 14))])
    line = "[IMG]" * 3
    assert whole == f"see {line}[IMG_BREAK]{line}[IMG_END]"


@torch.inference_mode()
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_logits_are_those_of_transformers(name):
    pictures = [prepared(name, (61, 40)), prepared(name, (33, 97), 1)]
    _, ids = prompt_of(name, pictures)
    checkpoint = open_checkpoint(tiny.folder(name))
    model, vision = checkpoint.load("cpu", torch.float32), checkpoint.vision
    places = placeholders_of(vision, checkpoint.tokenizer())
    pieces = pieces_of(pictures, places.spans(ids, pictures), vision)
    whole = Chunk(Request(1, ids, SamplingParams(), pieces=pieces), 0, len(ids), 0, (), 1)
    reach_T = next((torch.from_numpy(found.reach_S) for found in reaches_of([whole])), None)
    axes_3T = torch.from_numpy(axes_offsets([whole], len(ids)) + np.arange(len(ids)))
    attend = PackedDocuments([len(ids)], "cpu", reach_T, axes_3T)
    tower, rules = checkpoint.load_tower("cpu", torch.float32), checkpoint.image_rules()
    model.arena_RD = torch.cat(TowerRunner(tower, rules, lambda row, rows: None).rows(pictures))
    words, row = torch.tensor(ids), 0
    for at, id in enumerate(ids):
        if id == tiny.IMAGE_TOKEN:
            words[at], row = -2 - row, row + 1
    ours = model.logits(model(words, attend.positions_T(), attend))
    both = [tiny.photograph(61, 40), tiny.photograph(33, 97, 1)]
    nested = [both] if name in ("idefics3", "smolvlm") else both
    given = tiny.image_processor(name)(nested, return_tensors="pt")
    asked = tiny.features(name, given) | tiny.token_types(name, ids)
    wanted = tiny.reference(name)(input_ids=torch.tensor([ids]), **asked).logits[0]
    torch.testing.assert_close(ours, wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_families_that_are_not_whole_are_refused_by_name(kind):
    config = {"model_type": kind, "vision_config": {}, "text_config": {}}
    with pytest.raises(UnsupportedModel, match=f"'{kind}' are not supported: it needs"):
        split_config(config)


def test_older_files_of_qwen_have_the_decoder_beside_the_tower():
    """As Qwen2-VL was released: no text_config, rope_scaling of type mrope, and names without a prefix."""
    config = read_json(tiny.folder("qwen2-vl") / "config.json")
    text, spec = split_config(config)
    own = {key: value for key, value in config["text_config"].items() if key != "rope_parameters"}
    marks = {key: config[key] for key in ("image_token_id", "video_token_id", "vision_config")}
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    old = own | marks | {"model_type": "qwen2_vl", "rope_theta": 1e4, "rope_scaling": scaling}
    flat, same = split_config(old)
    assert (from_hf(flat), same) == (from_hf(text), spec)
    assert part_of("visual.blocks.0.norm1.weight") == ("tower", "blocks.0.norm1.weight")
    assert part_of("visual.merger.ln_q.weight") == ("projector", "merger.ln_q.weight")
    assert part_of("model.layers.0.mlp.up_proj.weight")[0] == "text"


@torch.inference_mode()
def test_pixels_behind_the_last_whole_patch_are_left_out():
    """As by the convolution of SigLIP with patches of 14 pixels in pictures of 384."""
    pixels_NHWC, kernel = torch.randn(2, 23, 17, 3), torch.randn(5, 3, 7, 7)
    patches_PE, grids = patches_of(pixels_NHWC, 7)
    assert [tuple(grid) for grid in grids] == [(3, 2)] * 2
    wanted = torch.nn.functional.conv2d(pixels_NHWC.permute(0, 3, 1, 2), kernel, stride=7)
    found = patches_PE @ kernel.flatten(1).t()
    torch.testing.assert_close(found, wanted.flatten(2).transpose(1, 2).flatten(0, 1))
