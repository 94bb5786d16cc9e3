"""Prompts with a gap, as each family of code models was trained on them."""

import pytest
import tiny_tokenizers

from cairn.core.errors import RequestError
from cairn.models.infill import ExtraFile, infill_ids, infill_marks
from cairn.models.tokenizer import SpecialTokens, Tokenizer

FAMILIES = {
    "<|fim_prefix|> <|fim_suffix|> <|fim_middle|>": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
    "<fim_prefix> <fim_suffix> <fim_middle>": "<fim_prefix>a<fim_suffix>b<fim_middle>",
    "<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜>": "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>",
    "▁<PRE> ▁<SUF> ▁<MID>": "▁<PRE>a▁<SUF>b▁<MID>",
    "[PREFIX] [SUFFIX]": "[SUFFIX]b[PREFIX]a",
}


def with_tokens(*added: str) -> Tokenizer:
    backend = tiny_tokenizers.byte_level()
    backend.add_tokens(list(added))
    return Tokenizer(backend, SpecialTokens(eos_ids=(0,)))


@pytest.mark.parametrize(("marks", "wanted"), FAMILIES.items())
def test_each_family_has_its_order(marks, wanted):
    tokenizer = with_tokens(*marks.split())
    assert tokenizer.decode(infill_ids(tokenizer, "a", "b"), skip_special=False) == wanted
    named = [ExtraFile("c.py", "c")]
    around = tokenizer.decode(infill_ids(tokenizer, "a", "b", named), skip_special=False)
    assert around == f"--- c.py ---\nc\n{wanted}"


def test_a_model_without_marks_says_so():
    tokenizer = with_tokens("<|fim_prefix|>", "<fim_suffix>", "<fim_middle>")  # of two families
    assert infill_marks(tokenizer) is None
    with pytest.raises(RequestError, match="fill in the middle"):
        infill_ids(tokenizer, "a", "b")
