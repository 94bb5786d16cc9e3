"""`cairn tune`: `cairn train` for a model that exists, with an adapter by flag. Trains nothing itself."""

from cairn.cli.train.train import run as train

DEFAULT_RANK = "16"


def run(args: list[str]) -> int:
    """`--lora [RANK]` is short for `--adapter.rank RANK`; everything else is a flag of `cairn train`."""
    return train(with_adapter(args))


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
            value = rest.pop(0) if rest and rest[0].isdigit() else DEFAULT_RANK
        long += ["--adapter.rank", value]
    return long
