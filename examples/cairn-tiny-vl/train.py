"""Trains cairn-tiny-vl: a tower and a projector from nothing, and the attention of cairn-tiny, on drawn pictures.

    python train.py --seconds 200 --out work/cairn-tiny-vl

Pictures and questions are made on the device, new ones in every step, so none is seen twice. What is measured on
pictures that were never trained on is in `curve.json`. Every tensor that cairn-tiny has already is left in its file.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from pack import write_model
from pictures import SIDE, draw, scenes
from questions import KINDS, Asked, Questions
from torch import Tensor, nn

from cairn.models.attend import AttentionRule
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import Checkpoint, open_checkpoint
from cairn.models.hub import resolve
from cairn.models.layer_loop import PlainResidual, PlainStep
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Transformer
from cairn.models.vision.spec import ProjectorSpec, TowerSpec, VisionSpec
from cairn.models.vision.tower import Tower, patches_of
from cairn.models.weights import fill_random

PATCH = 16
IMAGE_TOKEN = 3  # <|pad|> of cairn-tiny, which its conversations never hold
QUESTIONS = 4  # for each picture
HELD_OUT_SEED = 10**9


def vision_spec(text: ModelSpec) -> VisionSpec:
    shape = ModelSpec(
        family="siglip",
        vocab=1,
        hidden=160,
        layers=6,
        heads=5,
        kv_heads=5,
        head_dim=32,
        intermediate=640,
        context=(SIDE // PATCH) ** 2,
        norm="layer",
        norm_eps=1e-6,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        activation="gelu_tanh",
        gated=False,
        positions="learned",
    )
    tower = TowerSpec(shape, patch=PATCH, image=SIDE)
    return VisionSpec("llava", tower, ProjectorSpec("mlp", text.hidden), IMAGE_TOKEN)


class Asking:
    """Equally long sequences: a picture, then blocks of a question and its answer, each behind the picture alone.

    An `Attend`. Questions do not see each other, so each is as if it were asked first, and the picture is read once.
    """

    def __init__(self, sequences: int, picture: int, block: int, device: torch.device) -> None:
        self.sequences = sequences
        at_S = torch.arange(picture + QUESTIONS * block, device=device)
        block_S = ((at_S - picture) // block).clamp(min=-1)
        same = (block_S[:, None] == block_S) | (block_S == -1)
        self.mask_SS = same & (at_S[:, None] >= at_S)
        inside = torch.where(block_S < 0, at_S, picture + (at_S - picture) % block)
        self.positions_T = inside.repeat(sequences)

    def __call__(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: AttentionRule) -> Tensor:
        q, k, v = (
            x.unflatten(0, (self.sequences, -1)).transpose(1, 2) for x in (q_THC, k_TKC, v_TKC)
        )
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask_SS, scale=rule.scale)
        return y.transpose(1, 2).flatten(0, 1)

    def lengths_T(self) -> Tensor:
        raise NotImplementedError("rotary positions of this model do not depend on lengths")


class Trained(nn.Module):
    def __init__(self, text: Transformer, tower: Tower, questions: Questions, before: list[int]):
        super().__init__()
        self.text, self.tower, self.questions = text, tower, questions
        rows = tower.spec.rows(SIDE, SIDE)
        self.rows, self.head = rows, len(before)
        device = questions.device
        newline = before[-1:]  # every conversation has one behind the picture too
        self.before = torch.tensor([*before, *[IMAGE_TOKEN] * rows, *newline], device=device)

    def forward(self, pixels_BHWC: Tensor, asked: Asked) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of the answers' tokens [B, A, V], the tokens, and which of them count."""
        tokens_BS, at_BA, wanted_BA, counts_BA = self._sequences(asked)
        scaled = pixels_BHWC.float() / 127.5 - 1
        patches, grids = patches_of(scaled, PATCH)
        rows = self.tower(patches, grids).unflatten(0, (-1, self.rows))
        x_BSD = self.text.embedding(tokens_BS.flatten()).unflatten(0, tokens_BS.shape)
        head, tail = x_BSD[:, : self.head], x_BSD[:, self.head + self.rows :]
        x_TD = torch.cat((head, rows.to(x_BSD.dtype), tail), dim=1).flatten(0, 1)
        count, length = tokens_BS.shape
        before = len(self.before)
        attend = Asking(count, before, (length - before) // QUESTIONS, x_TD.device)
        step = PlainStep(attend, self.text.rotations(attend.positions_T, attend, x_TD.dtype))
        hidden_TD, _ = self.text.through(PlainResidual(x_TD), step)
        hidden_BSD = hidden_TD.unflatten(0, (count, length))
        picked = hidden_BSD.gather(1, at_BA[..., None].expand(-1, -1, hidden_BSD.shape[-1]))
        return self.text.logits(picked.flatten(0, 1)), wanted_BA.flatten(), counts_BA.flatten()

    def _sequences(self, asked: Asked) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [B, S]; of each token of an answer where it is predicted, itself, and whether it is one.

        `asked` has QUESTIONS questions for each picture, one behind the other.
        """
        q, a = self.questions.asked, self.questions.answered
        question, answer = q.ids_RL[asked.question_B], a.ids_RL[asked.answer_B]
        q_len, a_len = q.length_R[asked.question_B, None], a.length_R[asked.answer_B, None]
        longest = question.shape[1] + answer.shape[1]
        at = torch.arange(longest, device=question.device)[None].expand(len(question), -1)
        inside = question.gather(1, at.clamp(max=question.shape[1] - 1))
        behind = answer.gather(1, (at - q_len).clamp(0, answer.shape[1] - 1))
        tail = torch.where(at < q_len, inside, behind).view(-1, QUESTIONS * longest)
        tokens = torch.cat((self.before.expand(len(tail), -1), tail), dim=1)
        places = torch.arange(answer.shape[1], device=question.device)[None]
        begin = longest * (torch.arange(len(question), device=question.device) % QUESTIONS)
        at_QA = len(self.before) + begin[:, None] + q_len - 1 + places
        several = (-1, QUESTIONS * answer.shape[1])
        return tokens, at_QA.view(several), answer, places < a_len


def trainable(model: Trained) -> list[dict[str, object]]:
    """Everything of the tower; of the decoder its attention."""
    model.text.requires_grad_(False)
    attention = []
    for name, parameter in model.text.named_parameters():
        if ".attention." in name and "norm" not in name:
            attention.append(parameter.requires_grad_(True))
        elif torch.cuda.is_available():
            parameter.data = parameter.data.bfloat16()  # as it is stored
    model.tower.requires_grad_(True)
    return [
        {"params": list(model.tower.parameters()), "share": 1.0},
        {"params": attention, "share": 0.4},
    ]


def batch(questions: Questions, count: int, generator: torch.Generator) -> tuple[Tensor, Asked]:
    found = scenes(count, generator)
    repeated = type(found)(*(part.repeat_interleave(QUESTIONS, 0) for part in found))
    return draw(found), questions.ask(repeated, generator)


@torch.no_grad()
def accuracy(model: Trained, count: int) -> dict[str, float]:
    """Of whole answers, by kind of question, on pictures of a seed that training never uses."""
    device = model.questions.device
    generator = torch.Generator(device).manual_seed(HELD_OUT_SEED)
    right: dict[str, list[int]] = {kind: [0, 0] for kind in KINDS}
    for _ in range(max(1, count // 512)):
        pixels, asked = batch(model.questions, min(count, 512), generator)
        with torch.autocast(device.type, torch.bfloat16):
            scores, wanted, counts = model(pixels, asked)
        good = ((scores.argmax(-1) == wanted) | ~counts).unflatten(0, (len(asked.kind_B), -1))
        whole = good.all(1)
        for at, kind in enumerate(KINDS):
            of_kind = asked.kind_B == at
            right[kind][0] += int((whole & of_kind).sum())
            right[kind][1] += int(of_kind.sum())
    found = {kind: hits / max(1, number) for kind, (hits, number) in right.items()}
    total = sum(hits for hits, _ in right.values()) / sum(number for _, number in right.values())
    return {"all": total} | found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=200)
    options.add_argument("--steps", type=int, default=10**9)
    options.add_argument("--pictures", type=int, default=384)
    options.add_argument("--lr", type=float, default=1.2e-3)
    options.add_argument("--warm", type=int, default=200, help="steps up to the full rate")
    options.add_argument("--out", type=Path, default=Path("work/cairn-tiny-vl"))
    options.add_argument("--start", help="go on with this model: cairn-tiny-vl, or its folder")
    options.add_argument("--measured", type=int, default=2048, help="held-out pictures")
    options.add_argument("--every", type=float, default=15.0, help="seconds between measurements")
    given = options.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    base = open_checkpoint(resolve("cairn-tiny"))
    tokenizer = base.tokenizer()
    text, tower = started(base, given.start, device)

    def encode(said: str) -> list[int]:
        return tokenizer.encode(said, special=False)

    model = Trained(text, tower, Questions(encode, device), encode("<|im_start|>user\n"))
    groups = trainable(model)
    optimizer = torch.optim.AdamW(
        groups, lr=given.lr, betas=(0.9, 0.95), weight_decay=0.05, fused=device.type == "cuda"
    )
    curve = run(model, optimizer, given, device)
    write_model(given.out, model, base, curve)
    print(json.dumps(curve["points"][-1]))


def started(base: Checkpoint, name: str | None, device: torch.device) -> tuple[Transformer, Tower]:
    """The decoder and the tower: cairn-tiny's with one of random numbers, or both of a trained model."""
    if name is not None:
        before = open_checkpoint(resolve(name))
        tower = before.load_tower(str(device), torch.float32)
        assert tower is not None, f"{name} sees no pictures"
        return before.load(str(device), torch.float32, fused=False), tower
    tower = Tower(vision_spec(base.spec), ModelBuild("meta", torch.float32))
    fill_random(tower, tower.slots(), device, seed=0)
    return base.load(str(device), torch.float32, fused=False), tower


def run(
    model: Trained,
    optimizer: torch.optim.Optimizer,
    given: argparse.Namespace,
    device: torch.device,
) -> dict[str, object]:
    """Until the time or the steps are over; the rate falls with whichever is nearer its end."""
    generator = torch.Generator(device).manual_seed(1)
    began, step, points, noted = time.monotonic(), 0, [], 0.0
    while True:
        spent = time.monotonic() - began
        done = max(spent / given.seconds, step / given.steps)
        if spent - noted >= given.every or done >= 1:
            noted = spent
            measured = {
                name: round(value, 4) for name, value in accuracy(model, given.measured).items()
            }
            points.append({"step": step, "seconds": round(spent, 1), **measured})
            print(json.dumps(points[-1]), flush=True)
        if done >= 1:
            break
        rate = min(1.0, (step + 1) / max(given.warm, 1)) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = given.lr * group["share"] * max(rate, 0.01)
        pixels, asked = batch(model.questions, given.pictures, generator)
        with torch.autocast(device.type, torch.bfloat16):
            scores, wanted, counts = model(pixels, asked)
        losses = F.cross_entropy(scores.float(), wanted, reduction="none")
        loss = (losses * counts).sum() / counts.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
        optimizer.step()
        step += 1
        if step in (1, 10, 50, 100) or step % 200 == 0:
            print(
                step, round(float(loss.detach()), 4), round(time.monotonic() - began, 1), flush=True
            )
    return {"pictures": step * given.pictures, "steps": step, "points": points}


if __name__ == "__main__":
    main()
