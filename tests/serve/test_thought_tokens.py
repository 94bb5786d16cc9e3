"""Tokens of thoughts, counted by the ids of the marks; the oracle is the tokenizer on the thought alone."""

import pytest
import tiny_tokenizers

from cairn.models.tokenizer import SpecialTokens, Tokenizer
from cairn.serve.http.chat.harmony import MARKS
from cairn.serve.http.chat.thought_tokens import MOST_READ, thought_tokens

HM = "Hm, well: 漢字?"


def with_marks(*marks: str) -> Tokenizer:
    backend = tiny_tokenizers.byte_level()
    backend.add_special_tokens(list(marks))
    return Tokenizer(backend, SpecialTokens())


MARKED = with_marks("<think>", "</think>", "<eos>", *MARKS)
ANALYSIS = f"<|channel|>analysis<|message|>{HM}<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "thoughts"),
    [
        (f"<think>{HM}</think>Yes.", 1),
        (f"{HM}</think>Yes.", 1),  # the template had opened the block
        (f"<think>{HM}", 1),  # cut off
        (f"<think>{HM}<eos>", 1),
        (f"{ANALYSIS}<|channel|>final<|message|>Yes.<|return|>", 1),
        (f"{ANALYSIS}{ANALYSIS}<|channel|>final<|message|>Yes.", 2),
        (f"<|channel|>analysis to=python<|message|>{HM}<|call|>", 1),
        ("<|channel|>commentary to=functions.f<|message|>{}<|call|>", 0),
    ],
)
def test_tokens_between_the_marks(text, thoughts):
    ids, one = MARKED.encode(text, special=False), len(MARKED.encode(HM, special=False))
    assert thought_tokens(ids, HM * thoughts, MARKED) == thoughts * one


def test_marks_that_are_no_tokens():
    """The tokenizer reads a short thought, and the beginning of a long one."""
    plain = with_marks()
    for thought in (HM, HM * MOST_READ):
        ids = plain.encode(f"<think>{thought}</think>Yes.", special=False)
        expected = len(plain.encode(thought, special=False))
        assert thought_tokens(ids, thought, plain) == pytest.approx(expected, rel=0.01)
    assert thought_tokens([1, 2], "", plain) == 0
