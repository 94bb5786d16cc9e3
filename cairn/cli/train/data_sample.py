"""`cairn data sample`: what a run has learnt from, by the numbers that it writes down when a step is bad.

    bad_steps.jsonl   {"step": 412, "samples": [3288, 3289], ...}      cairn data sample runs/x 3288

A sample is a pure function of its number and the recipe, so it is made again here; nothing of it was stored.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro

from cairn.cli.train.data_report import print_runs
from cairn.core.config import load
from cairn.core.errors import UsageError

if TYPE_CHECKING:
    from cairn.train.config import Train
    from cairn.train.data.batch import Batch

RECIPE = "recipe.toml"


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Print one sample of a run as text, as it was trained on; what is learnt stands out."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """the folder of a run, or a recipe as TOML"""
    number: Annotated[int, tyro.conf.Positional, tyro.conf.arg(metavar="[N]")] = 0
    """which sample, from 0, as bad_steps.jsonl has it"""
    json: bool = False
    """print the ids, which of them are learnt, the documents' lengths and the text as JSON"""


def run_sample(args: list[str]) -> int:
    options = load(Sample, args=args, env_prefix="CAIRN_DATA_SAMPLE_").value
    if options.number < 0:
        raise UsageError(f"there is no sample {options.number}", hint="samples count from 0")
    from cairn.train.describe import describe

    corpus, *_ = describe(_recipe(options.run))
    batch = corpus.source.batch(options.number)
    ids, learn = _learnt(batch)
    text = None if corpus.tokenizer is None else corpus.tokenizer.decode(ids, skip_special=False)
    if options.json:
        shown = {
            "sample": options.number,
            "ids": ids,
            "learn": learn,
            "lengths": batch.lengths,
            "text": text,
        }
        print(msgspec.json.encode(shown).decode())
    elif corpus.tokenizer is None:
        print(*ids)
    else:
        print_runs(corpus.tokenizer, ids, learn)
    return 0


def _recipe(run: Path) -> "Train":
    from cairn.cli.train.train import read, train_part
    from cairn.train.recipes import RECIPES

    if not run.exists() and str(run) not in RECIPES:
        raise UsageError(
            f"there is no run {run}", hint="name the folder that --out had, or a recipe"
        )
    if not run.is_dir():
        return train_part(read([str(run)]))
    file = run / RECIPE
    if not file.is_file():
        raise UsageError(
            f"{run} has no {RECIPE}: it is no run of cairn train",
            hint="name the folder that --out had; documents of a store: cairn data show",
        )
    return train_part(read([str(file), "--out", str(run)]))


def _learnt(batch: "Batch") -> tuple[list[int], list[bool]]:
    """All tokens of a sample, the last target included, and whether something is learnt from getting each right."""
    from cairn.train.data.batch import IGNORED

    targets = batch.targets_T.tolist()
    ids = batch.tokens_T.tolist()
    learn = [False, *(target != IGNORED for target in targets)]
    return (ids + targets[-1:], learn) if learn[-1] else (ids, learn[:-1])
