"""Compiled variants and benchmark cases of `draft_ngrams`."""

from collections.abc import Iterator

import torch

from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.sampling.draft_ngrams import (
    CONSTANTS,
    cost,
    draft_ngrams,
    draft_ngrams_reference,
    random_texts,
)
from cairn.kernels.sampling.draft_ngrams_kernel import _draft_kernel

KERNEL = "cairn.kernels.sampling.draft_ngrams"
POINTERS = ("rows", "bounds", "tokens", "positions", "text")
NUMBERS = {"text_stride": "i32", "made_stride": "i32"}


def _variant(name: str, pointers: tuple[str, ...], fixed: dict[str, None]) -> Variant:
    kinds = dict.fromkeys(pointers, "*i32") | NUMBERS
    return Variant(
        name, _draft_kernel, kinds, CONSTANTS | {"OVERLAP": True} | fixed, {"num_warps": 8}, ()
    )


VARIANTS = [
    _variant("n-grams drafted", POINTERS, {"made": None}),
    _variant("a head's drafts put in place", (*POINTERS, "made"), {}),
]


def _prepare(rows: int, length: int) -> Prepared:
    rows_B, bounds_B1, tokens_T, positions_T, text_NC = random_texts(rows, length, 4, "cuda")
    given_T = tokens_T.clone()

    def run() -> None:
        tokens_T.copy_(given_T)
        draft_ngrams(rows_B, bounds_B1, tokens_T, positions_T, text_NC, impl="triton")

    def error() -> float:
        wanted_T, twin_NC = given_T.clone(), text_NC.clone()
        draft_ngrams_reference(rows_B, bounds_B1, wanted_T, positions_T, twin_NC)
        run()
        same = torch.equal(tokens_T, wanted_T) and torch.equal(text_NC, twin_NC)
        return 0.0 if same else 1.0

    return Prepared(run, {}, error)


def cases() -> Iterator[Case]:
    for rows, length in ((1, 512), (1, 8192), (64, 1024)):
        yield Case(
            "n-gram drafts",
            f"{rows} rows of {length} tokens, 4 drafts",
            "int32",
            cost(rows, length, 4),
            lambda rows=rows, length=length: _prepare(rows, length),
            graph=True,
        )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
