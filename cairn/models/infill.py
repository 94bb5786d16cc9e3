"""Fill-in-the-middle (FIM) prompts of code models.

    Qwen2.5-Coder     <|fim_prefix|> before <|fim_suffix|> after <|fim_middle|>     -> what stands between
    Codestral         [SUFFIX] after [PREFIX] before

The marks are tokens of the vocabulary, found by their names; a model without them was never trained for it. Files that
lie around the text come first, each behind the mark of a file where there is one.
"""

from collections.abc import Sequence

import msgspec

from cairn.core.errors import RequestError
from cairn.models.tokenizer import Tokenizer


class InfillMarks(msgspec.Struct, frozen=True):
    """The tokens around the two texts; `middle` is None where the answer follows the text before."""

    prefix: str
    suffix: str
    middle: str | None
    file: str | None = None
    suffix_first: bool = False


class ExtraFile(msgspec.Struct, frozen=True):
    filename: str
    text: str


KNOWN = (
    InfillMarks(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"
    ),  # Qwen, Gemma
    InfillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"),  # StarCoder, Granite
    InfillMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    InfillMarks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    InfillMarks("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
)


def infill_marks(tokenizer: Tokenizer) -> InfillMarks | None:
    """FIM markers of a model; None if it has none."""
    id_of = tokenizer.backend.token_to_id
    for marks in KNOWN:
        needed = (marks.prefix, marks.suffix, marks.middle)
        if all(mark is None or id_of(mark) is not None for mark in needed):
            known_file = marks.file is not None and id_of(marks.file) is not None
            return marks if known_file else msgspec.structs.replace(marks, file=None)
    return None


def infill_ids(
    tokenizer: Tokenizer, before: str, after: str, files: Sequence[ExtraFile] = ()
) -> list[int]:
    """The prompt whose answer belongs between the two texts; RequestError: this model cannot be asked so."""
    marks = infill_marks(tokenizer)
    if marks is None:
        raise RequestError(
            "this model has no tokens for a text with a gap (fill in the middle)",
            hint="use a code model, such as Qwen2.5-Coder, or leave out the suffix",
        )
    begins = tokenizer.encode("")[:1]  # with BOS, where the tokenizer adds it
    start = begins if begins == [tokenizer.bos_id] else []
    prefix = [tokenizer.id(marks.prefix), *_text(tokenizer, before)]
    suffix = [tokenizer.id(marks.suffix), *_text(tokenizer, after)]
    middle = [] if marks.middle is None else [tokenizer.id(marks.middle)]
    parts = suffix + prefix if marks.suffix_first else prefix + suffix
    return [*start, *_files(tokenizer, marks, files), *parts, *middle]


def _files(tokenizer: Tokenizer, marks: InfillMarks, files: Sequence[ExtraFile]) -> list[int]:
    ids: list[int] = []
    for file in files:
        if marks.file is None:
            ids += _text(tokenizer, f"--- {file.filename} ---\n{file.text}\n")
        else:
            ids += [tokenizer.id(marks.file), *_text(tokenizer, f"{file.filename}\n{file.text}\n")]
    return ids


def _text(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, special=False) if text else []
