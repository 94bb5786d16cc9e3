"""`cairn tune pictures`: fine-tune a model that sees, on chats with pictures. Trains nothing itself."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from cairn.core.config import load
from cairn.models.hub import TINY_VL
from cairn.report.progress import Bar, clock_time


class TunePicturesVerb(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fine-tune a model that sees on CHATS: JSON lines of messages with image parts.

    Only the assistant's words are learnt. A picture is a file beside CHATS, or a data URL. One device.
    """

    chats: tyro.conf.Positional[Path]
    """a .jsonl file, a chat in each line"""
    out: Path = Path("runs/pictures")
    """folder of the new model, which `cairn serve` takes"""
    model: str = TINY_VL
    """a model that sees: llava, pixtral, idefics3, smolvlm, mistral3"""
    steps: Annotated[int, msgspec.Meta(ge=1)] = 100
    batch: Annotated[int, msgspec.Meta(ge=1)] = 8
    """chats of a step"""
    lr: Annotated[float, msgspec.Meta(gt=0)] = 1e-4
    train_tower: bool = False
    """learn to see, too; without it the tower stays as it is"""
    seed: int = 0
    device: str = "auto"


@contextmanager
def shown(steps: int) -> Generator[Callable[[int, float], None]]:
    """A bar with the time left where a person watches, else a line every tenth step."""
    with Bar("training", steps, shown=sys.stderr.isatty()) as bar:

        def on_step(done: int, loss: float) -> None:
            bar.update(done, f"loss {loss:.3f}")
            if not bar.shown and (done % 10 == 0 or done in (1, steps)):
                left = clock_time(bar.left_s() or 0.0)
                print(f"step {done}/{steps} loss {loss:.4f}, {left} left", flush=True)

        yield on_step


def run(args: list[str]) -> int:
    verb = load(TunePicturesVerb, args=args, env_prefix="CAIRN_TUNE_PICTURES_").value
    from cairn.train.picture_run import PictureTuning, tune

    with shown(verb.steps) as on_step:
        losses = tune(PictureTuning(**msgspec.structs.asdict(verb)), on_step)
    print(f"{verb.out}: loss {losses[0]:.3f} -> {losses[-1]:.3f}; cairn serve {verb.out}")
    return 0
