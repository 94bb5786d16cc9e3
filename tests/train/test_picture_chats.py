"""Chats with pictures: the loss and every gradient, the tower's too, are those of transformers."""

import base64
import io
import json

import pytest
import torch

pytest.importorskip("PIL", reason="pictures are decoded by Pillow")
import tiny_vision as tiny

from cairn.core.errors import DataError
from cairn.models.checkpoint import open_checkpoint
from cairn.models.checkpoint_names import source
from cairn.models.vision.names import tower_source
from cairn.train.data.picture_chats import PictureChats
from cairn.train.picture_loss import picture_loss

PREFIXES = {"tower": "model.vision_tower.", "projector": "model.multi_modal_projector."}


def png(seed: int) -> bytes:
    file = io.BytesIO()
    tiny.photograph(31 + seed, 40, seed).save(file, "PNG")
    return file.getvalue()


def line(image: str, question: str, answer: str) -> str:
    asked = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    told = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": told}) + "\n"


@pytest.fixture
def chats(tmp_path):
    """A picture in a file beside the lines, and one in a data URL."""
    (tmp_path / "one.png").write_bytes(png(0))
    url = "data:image/png;base64," + base64.b64encode(png(1)).decode()
    path = tmp_path / "chats.jsonl"
    path.write_text(line("one.png", "What?", "A wave.") + line(url, "And this one?", "Noise!"))
    return path


def learnt(name: str, path, frozen: bool):
    checkpoint = open_checkpoint(tiny.folder(name))
    reader = PictureChats(checkpoint)
    model = checkpoint.load("cpu", torch.float32, fused=False).requires_grad_(True)
    tower = checkpoint.load_tower("cpu", torch.float32).requires_grad_(not frozen)
    loss = picture_loss(model, tower, reader.rules, list(reader.read(path)))
    loss.backward()
    return reader, model, tower, loss


def oracle(name: str, reader: PictureChats, path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean over the learnt tokens of both chats, one after the other."""
    theirs = tiny.reference(name)
    theirs.zero_grad()
    rules = tiny.image_processor(name)
    total, count = torch.zeros(()), 0
    for chat in reader.read(path):
        ids = torch.from_numpy(chat.ids).where(torch.from_numpy(chat.ids) >= 0, tiny.IMAGE_TOKEN)
        pixels = torch.from_numpy(chat.pictures[0].array().copy()).float() / 255
        pixels = (pixels - torch.tensor(rules.image_mean)) / torch.tensor(rules.image_std)
        logits = theirs(input_ids=ids[None], pixel_values=pixels.permute(0, 3, 1, 2)).logits[0]
        wanted = ids[1:].where(torch.from_numpy(chat.learn[1:]), -100)
        total = total + torch.nn.functional.cross_entropy(logits[:-1], wanted, reduction="sum")
        count += int((wanted != -100).sum())
    (total / count).backward()
    return total / count, {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}


def test_gradients_are_those_of_transformers(chats):
    reader, model, tower, loss = learnt("llava", chats, frozen=False)
    # The template has no prompt for an answer, so the name of the role is learnt with it.
    learnt_tokens = [int(chat.learn.sum()) for chat in reader.read(chats)]
    assert learnt_tokens == [len("assistant: A wave."), len("assistant: Noise!")]
    wanted_loss, wanted = oracle("llava", reader, chats)
    torch.testing.assert_close(loss, wanted_loss, atol=1e-5, rtol=0)
    spec, compared = tower.spec, 0
    for module, name_of in (
        (tower, lambda slot: _tower_name(spec, slot.name)),
        (model, lambda slot: _text_name(slot.name)),
    ):
        parameters = dict(module.named_parameters())
        for slot in module.slots():
            found, theirs = parameters[slot.parameter].grad, wanted.get(name_of(slot))
            if theirs is None:  # behind the layer that is read
                assert found is None or not found.any()
                continue
            found = found[slot.index] if slot.index else found
            torch.testing.assert_close(found.view_as(theirs), theirs, atol=2e-5, rtol=1e-3)
            compared += 1
    assert compared > 60


def _tower_name(spec, slot: str) -> str:
    shape = spec.tower.shape
    part, place = tower_source(shape.family, spec.projector.kind, slot, shape.hidden)
    return PREFIXES[part] + place.tensor.removeprefix("vision_model.")


def _text_name(slot: str) -> str:
    name = source("llama", slot).tensor
    return (
        name
        if name.startswith("lm_head")
        else "model.language_model." + name.removeprefix("model.")
    )


def test_a_frozen_tower_has_no_gradients(chats):
    _, model, tower, _ = learnt("llava", chats, frozen=True)
    assert all(parameter.grad is None for parameter in tower.parameters())
    assert model.embedding.weight.grad.any()


def test_what_is_no_picture_is_refused_with_its_line(tmp_path):
    path = tmp_path / "chats.jsonl"
    reader = PictureChats(open_checkpoint(tiny.folder("llava")))
    for image, said in (
        ("missing.png", "is no file"),
        ("http://localhost/a.png", "fetches nothing"),
        ("data:image/png;base64,!!", "not base64"),
        ("data:image/png;base64,é", "not base64"),
        ("data:image/png;base64,aGVsbG8=", "cannot be read"),
    ):
        path.write_text(line(image, "What?", "A wave."))
        with pytest.raises(DataError, match=f"line 1.*{said}"):
            list(reader.read(path))
