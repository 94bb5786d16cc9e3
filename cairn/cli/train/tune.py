"""`cairn tune`: `cairn train` for a model that exists, with an adapter by flag. Trains nothing itself."""

from typing import Annotated

import tyro

from cairn.cli.train.train import TrainVerb, carry_out, read
from cairn.core.errors import UsageError

DEFAULT_RANK = "16"


class TuneVerb(TrainVerb, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fine-tune a model that exists: RECIPE is a name or a TOML file, as for `cairn train`.

    `--lora [RANK]` trains a low-rank adapter and leaves the weights as they are; the run then has a folder `adapter`,
    which PEFT and `cairn serve --adapters` read. [objective] says what is learnt: text, or preferences.
    `cairn tune pictures CHATS` trains a model that sees on chats with pictures; see its --help.
    """

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[RECIPE]")] = "tiny-lora"
    """tiny-lora (an adapter for cairn-tiny, two minutes on a CPU), any recipe of `cairn train`, or a TOML file"""


def run(args: list[str]) -> int:
    """`--lora [RANK]` is short for `--adapter.rank RANK`; everything else is a flag of `cairn train`.

    `pictures` as the first word fine-tunes a model that sees.
    """
    if args[:1] == ["pictures"]:
        from cairn.cli.train import tune_pictures

        return tune_pictures.run(args[1:])
    return carry_out(read(with_adapter(args), TuneVerb, "cairn tune"))


def with_adapter(args: list[str]) -> list[str]:
    long: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name != "--lora":
            long.append(word)
            continue
        if not equals:
            value = rest.pop(0) if rest and _is_number(rest[0]) else DEFAULT_RANK
        if _is_number(value) and int(value) <= 0:
            raise UsageError(
                f"--lora {value}: an adapter has a rank of 1 or more",
                hint="leave --lora out, with --adapter.rank 0, to train the weights themselves",
            )
        long += ["--adapter.rank", value]
    return long


def _is_number(word: str) -> bool:
    return word.removeprefix("-").isdecimal()
