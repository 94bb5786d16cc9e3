"""What is asked about a picture, and the answer: tables of token ids, so that a batch is made without a loop.

count     How many red circles?          a number, also of a color or a shape alone
exists    Is there a blue square?        yes, no
color     What color is the triangle?    where there is one triangle
shape     What shape is red?             where one shape is red
where     Where is the red circle?       top left, .. where there is one
number    What number is this?           for pictures with a printed number
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from pictures import COLORS, SHAPES, SIDE, Scenes
from torch import Tensor

KINDS = ("count", "exists", "color", "shape", "where", "number")
WORDINGS = {
    "count": ("How many {}s?", "How many {}s are there?", "Count the {}s."),
    "exists": ("Is there a {}?", "Do you see a {}?"),
    "color": ("What color is the {}?", "Which color does the {} have?"),
    "shape": ("What shape is {}?", "Which shape is {}?"),
    "where": ("Where is the {}?",),
    "number": ("What number is this?", "Which number is printed?", "Read the number."),
}
QUADRANTS = ("top left", "top right", "bottom left", "bottom right")
ANY = -1  # color or shape


class Table(NamedTuple):
    """Rows of token ids, padded."""

    ids_RL: Tensor
    length_R: Tensor


class Asked(NamedTuple):
    kind_B: Tensor  # of KINDS
    question_B: Tensor  # rows of tables
    answer_B: Tensor


class Questions:
    """All questions and answers as token ids. `encode`: of a text."""

    def __init__(self, encode: Callable[[str], list[int]], device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.answers = [str(n) for n in range(1000)] + ["yes", "no", *COLORS, *SHAPES, *QUADRANTS]
        self._row: dict[str, int] = {text: at for at, text in enumerate(self.answers)}
        texts: list[str] = []
        colors, shapes = len(COLORS) + 1, len(SHAPES) + 1
        first = torch.zeros(len(KINDS), colors, shapes, dtype=torch.long)
        for at, kind in enumerate(KINDS):
            for color in range(-1, len(COLORS)):
                for shape in range(-1, len(SHAPES)):
                    first[at, color, shape] = len(texts)  # ANY is the last of each
                    what = named(color, shape, kind == "shape")
                    texts += [wording.format(what) for wording in WORDINGS[kind]]
        self.texts = texts
        self.first = first.to(self.device)
        self.wordings = torch.tensor([len(WORDINGS[kind]) for kind in KINDS], device=self.device)
        user = [encode(text + "<|im_end|>\n<|im_start|>assistant\n") for text in texts]
        self.asked = table(user, self.device)
        self.answered = table([encode(text + "<|im_end|>") for text in self.answers], self.device)

    def ask(self, found: Scenes, generator: torch.Generator) -> Asked:
        """One question for each picture."""
        count, device = len(found.number_B), self.device

        def draw(most: int) -> Tensor:
            return torch.randint(0, most, (count,), generator=generator, device=device)

        there = found.present_BK
        one = (torch.rand(there.shape, generator=generator, device=device) * there).argmax(1)
        color = found.color_BK.gather(1, one[:, None])[:, 0]
        shape = found.shape_BK.gather(1, one[:, None])[:, 0]
        other = draw(4) == 0  # one that may not be there
        color = torch.where(other, draw(len(COLORS)), color)
        shape = torch.where(other, draw(len(SHAPES)), shape)
        wide = draw(6)  # some ask for a color or a shape alone, or for everything
        color = torch.where((wide == 0) | (wide == 1) & (draw(2) == 0), ANY, color)
        shape = torch.where((wide == 2) | (color == ANY) & (draw(4) == 0), ANY, shape)
        kind = torch.tensor([0, 0, 0, 1, 2, 3, 4], device=device)[draw(7)]
        color = torch.where(kind == 2, ANY, torch.where(kind == 3, color.clamp(min=0), color))
        shape = torch.where(kind == 3, ANY, torch.where(kind == 2, shape.clamp(min=0), shape))
        matching = self._matching(found, color, shape)
        number = matching.sum(1)
        kind = torch.where((kind >= 2) & (number != 1), draw(2), kind)  # there is none, or several
        kind = torch.where(found.number_B >= 0, 5, kind)
        first = self.first[kind, color, shape]
        question = first + draw(60) % self.wordings[kind]
        return Asked(kind, question, self._answer(found, kind, matching, number))

    def _matching(self, found: Scenes, color: Tensor, shape: Tensor) -> Tensor:
        same_color = (found.color_BK == color[:, None]) | (color == ANY)[:, None]
        same_shape = (found.shape_BK == shape[:, None]) | (shape == ANY)[:, None]
        return found.present_BK & same_color & same_shape

    def _answer(self, found: Scenes, kind: Tensor, matching: Tensor, number: Tensor) -> Tensor:
        it = matching.long().argmax(1, keepdim=True)
        color, shape, x, y = (
            part.gather(1, it)[:, 0]
            for part in (found.color_BK, found.shape_BK, found.x_BK, found.y_BK)
        )
        quadrant = 2 * (y > SIDE / 2).long() + (x > SIDE / 2).long()
        row = self._row
        choices = torch.stack(
            (
                number,
                torch.where(number > 0, row["yes"], row["no"]),
                row["red"] + color,
                row["circle"] + shape,
                row["top left"] + quadrant,
                found.number_B.clamp(min=0),
            )
        )
        return choices.gather(0, kind[None])[0]


def named(color: int, shape: int, adjective: bool = False) -> str:
    """Such as "red circle"; a color alone is an adjective, or a shape of that color."""
    colors, noun = list(COLORS), SHAPES[shape] if shape != ANY else "shape"
    if adjective and color != ANY:
        return colors[color]
    return noun if color == ANY else f"{colors[color]} {noun}"


def table(rows: list[list[int]], device: torch.device) -> Table:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    return Table(ids, torch.tensor([len(row) for row in rows], device=device))
