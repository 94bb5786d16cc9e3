"""What was thought and what was said, wherever the text is cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.serve.http.chat.reasoning import ReasoningSplitter, Split, opened_by, split_reasoning

WHOLE = [
    ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
    ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
    ("\n <think>Hm.</think>Yes.\n", False, "Hm.", "Yes.\n"),
    ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
    ("<think>Hm.</think>Yes <think>no</think>", False, "Hm.", "Yes <think>no</think>"),
    ("No block <think>here</think>.", False, "", "No block <think>here</think>."),
    ("  spaced answer ", False, "", "  spaced answer "),
    ("<think>cut of", False, "cut of", ""),
    ("cut off </thi", True, "cut off </thi", ""),
    ("<think>again</think>ok", True, "again", "ok"),
    ("<thin", False, "", "<thin"),
    ("a < b and </thing> c</think>x", True, "a < b and </thing> c", "x"),
    ("", False, "", ""),
    ("", True, "", ""),
]


@pytest.mark.parametrize(("text", "inside", "reasoning", "content"), WHOLE)
def test_a_whole_answer(text, inside, reasoning, content):
    assert split_reasoning(text, inside) == Split(reasoning, content)
    assert in_pieces(list(text), inside) == Split(reasoning, content)


def in_pieces(pieces: list[str], inside: bool) -> Split:
    splitter = ReasoningSplitter(inside)
    parts = [*map(splitter.push, pieces), splitter.flush()]
    return Split("".join(p.reasoning for p in parts), "".join(p.content for p in parts))


words = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "think", ">", "</", "\n", " ", "a", "Yes.", "é"]),
    max_size=12,
)


@given(words=words, cuts=st.lists(st.integers(0, 80)), inside=st.booleans())
def test_no_cut_changes_the_result(words, cuts, inside):
    text = "".join(words)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert in_pieces(pieces, inside) == split_reasoning(text, inside)
    assert in_pieces(list(text), inside) == split_reasoning(text, inside)


@given(words=words, inside=st.booleans())
def test_nothing_but_marks_and_spaces_is_lost(words, inside):
    found = split_reasoning("".join(words), inside)
    kept = "".join((found.reasoning + found.content).split())
    bare = "".join("".join(words).split())
    assert len(bare) - len(kept) in (0, len("<think>"), len("</think>"), len("<think></think>"))


def test_a_thought_is_handed_on_before_it_ends():
    splitter = ReasoningSplitter(inside=True)
    assert splitter.push("First, ").reasoning == "First,"
    assert splitter.push("I look").reasoning == " I look"
    assert splitter.push("</think>").reasoning == ""
    assert splitter.push("\n\nDone").content == "Done"


def test_whether_a_template_has_opened_the_block():
    assert opened_by("<|im_start|>assistant\n<think>\n")
    assert not opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opened_by("<|im_start|>assistant\n")


def test_other_marks():
    splitter = ReasoningSplitter(marks=("[THINK]", "[/THINK]"))
    assert splitter.push("[THINK]a[/THINK]b") == Split("a", "b")
