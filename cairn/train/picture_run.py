"""Fine-tunes a model that sees on chats with pictures, on one device, and writes it as a checkpoint again.

    chats.jsonl -> steps of `picture_loss` -> OUT: the files of the model, and model.safetensors with the new weights

The tower stays as it is unless asked for. A loop of its own: the trainer's parallel layouts and checkpoints know text
alone. Every epoch has another order, which depends on the seed.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from cairn.core.errors import ConfigError, DataError
from cairn.models.checkpoint import Checkpoint, open_checkpoint
from cairn.models.checkpoint_names import sources
from cairn.models.hub import resolve
from cairn.models.safetensors_file import write_tensors
from cairn.models.transformer import Transformer
from cairn.models.vision.names import Part, part_of, tower_source
from cairn.models.vision.tower import Tower
from cairn.train.data.picture_chats import PictureChat, PictureChats
from cairn.train.picture_loss import picture_loss

WEIGHTS = "model.safetensors"


class PictureTuning(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    chats: Path
    out: Path
    steps: int = 100
    batch: int = 8  # chats of a step
    lr: float = 1e-4
    train_tower: bool = False
    seed: int = 0
    device: str = "auto"


def tune(
    config: PictureTuning, on_step: Callable[[int, float], None] = lambda step, loss: None
) -> list[float]:
    """The loss of every step; `config.out` is a model that can be served. `on_step`: steps done, and the last loss."""
    checkpoint = _opened(config)
    reader = PictureChats(checkpoint)
    chats = list(reader.read(config.chats))
    if not chats:
        raise DataError(f"{config.chats} has no chats")
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = checkpoint.load(device, torch.float32, fused=False).requires_grad_(True)
    tower = checkpoint.load_tower(device, torch.float32)
    assert tower is not None  # `PictureChats` refuses models without one
    tower.requires_grad_(config.train_tower)
    new = stored_weights(checkpoint, model, tower if config.train_tower else None)
    config.out.mkdir(parents=True, exist_ok=True)  # now: what cannot be written ends no long run
    trained = [p for p in (*model.parameters(), *tower.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    for step, batch in enumerate(_batches(chats, config)):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * _rate(step, config.steps)
        loss = picture_loss(model, tower, reader.rules, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        on_step(step + 1, losses[-1])
    write(config.out, checkpoint, new)
    return losses


def _opened(config: PictureTuning) -> Checkpoint:
    out = config.out
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file", hint="name a new folder with --out")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty", hint="name a new folder with --out")
    checkpoint = open_checkpoint(resolve(config.model))
    if (method := checkpoint.method()) is not None:
        raise ConfigError(
            f"{config.model} is quantised ({method}), and tuned weights are written in floating point",
            hint="tune the model in floating point, and quantise the result",
        )
    return checkpoint


def _batches(
    chats: Sequence[PictureChat], config: PictureTuning
) -> Iterator[Sequence[PictureChat]]:
    draw, left = torch.Generator().manual_seed(config.seed), list[int]()
    for _ in range(config.steps):
        while len(left) < config.batch:
            left += torch.randperm(len(chats), generator=draw).tolist()
        taken, left = left[: config.batch], left[config.batch :]
        yield [chats[at] for at in taken]


def _rate(step: int, steps: int) -> float:
    """A tenth of the steps up, then half a cosine down."""
    up = max(1, steps // 10)
    if step < up:
        return (step + 1) / up
    return max(0.05, 0.5 * (1 + math.cos(math.pi * (step - up) / max(1, steps - up))))


def stored_weights(
    checkpoint: Checkpoint, model: Transformer, tower: Tower | None
) -> dict[str, Tensor]:
    """The trained weights by their names in the checkpoint, as views: what cannot be written is refused before a step.

    `tower`: None where it is frozen.
    """
    views = dict(_text_tensors(checkpoint, model))
    if tower is not None:
        views |= dict(_tower_tensors(tower))
    names = {part_of(name): name for name in checkpoint.whole.names()}
    if missing := views.keys() - names.keys():
        raise ConfigError(
            f"{checkpoint.path} has no place for {sorted(missing)[:3]}",
            hint="begin with a checkpoint that stores every weight of its model",
        )
    return {names[place]: view.detach() for place, view in views.items()}


def write(folder: Path, checkpoint: Checkpoint, new: Mapping[str, Tensor]) -> None:
    """All tensors in one file under the names that they had; what is not `new` as it was."""
    whole, tensors = checkpoint.whole, {}
    for name in whole.names():
        tensor = new.get(name)
        tensors[name] = whole.tensor(name) if tensor is None else tensor.to(whole.dtype(name))
    for path in checkpoint.path.iterdir():
        if path.is_file() and not path.name.startswith("model") and path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_tensors(contiguous, folder / WEIGHTS)
    listed = {"metadata": {}, "weight_map": dict.fromkeys(contiguous, WEIGHTS)}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(listed, indent=1) + "\n")


def _text_tensors(
    checkpoint: Checkpoint, model: Transformer
) -> Iterator[tuple[tuple[Part, str], Tensor]]:
    """Tensors by part of the checkpoint and name."""
    parameters, slots = dict(model.named_parameters()), list(model.slots())
    places = sources(checkpoint.spec, {slot.name: slot.shape for slot in slots})
    for slot in slots:
        place = places[slot.name]
        if not place.is_whole:
            raise ConfigError(
                f"{place.tensor} is stored in another order than it is trained in",
                hint="families that store each matrix as it is can be written: llama, mistral, qwen",
            )
        yield ("text", place.tensor), parameters[slot.parameter][slot.index or ...]


def _tower_tensors(tower: Tower) -> Iterator[tuple[tuple[Part, str], Tensor]]:
    parameters, spec = dict(tower.named_parameters()), tower.spec
    shape = spec.tower.shape
    for slot in tower.slots():
        part, place = tower_source(shape.family, spec.projector.kind, slot.name, shape.hidden)
        if not place.is_whole:
            raise ConfigError(
                f"{place.tensor} is stored in another order than it is trained in",
                hint="leave the tower as it is",
            )
        yield (part, place.tensor), parameters[slot.parameter][slot.index or ...]
