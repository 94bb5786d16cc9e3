"""TRL's rows of preferences, and what is refused of them."""

import json

import pytest

from cairn.core.errors import DataError
from cairn.train.data.preference_files import Pair, RatedAnswer, read_judged, read_pair


def line(**row):
    return json.dumps(row).encode()


def test_pairs():
    assert read_pair(line(prompt="a", chosen="b", rejected="c"), "x") == Pair("a", "b", "c")
    assert read_pair(line(chosen="The sky is blue", rejected="The sky is green"), "x") == Pair(
        "The sky is", " blue", " green"
    )
    user = {"role": "user", "content": "Hi"}
    good, bad = ({"role": "assistant", "content": text} for text in ("Hello", "No"))
    found = read_pair(line(chosen=[user, good], rejected=[user, bad]), "x")
    assert found == Pair([user], [good], [bad])


def test_judged():
    row = line(prompt="a", completion="b", label=False)
    assert read_judged(row, "x") == RatedAnswer("a", "b", False)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "f line 3 has no rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "neither a text"),
        ({"chosen": "b", "rejected": [{"role": "user", "content": "x"}]}, "not of one kind"),
        ({"chosen": "b", "rejected": "c", "margin": "much"}, "margin"),
    ],
)
def test_mistakes_have_file_and_line(row, said):
    with pytest.raises(DataError, match=said):
        read_pair(line(**row), "f line 3")
    with pytest.raises(DataError, match="label"):
        read_judged(line(prompt="a", completion="b", label="yes"), "f line 3")
