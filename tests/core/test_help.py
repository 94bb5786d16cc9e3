"""Help texts: a description fills its lines, wherever its source breaks them."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cairn.core.help import refolded

WIDTH = 60
words = st.lists(st.text("abcd(:", min_size=1, max_size=12), min_size=1, max_size=40)


@given(words=words, breaks=st.sets(st.integers(0, 40)), at=st.sampled_from([8, 20]))
def test_a_description_is_as_wide_as_the_terminal(words, breaks, at):
    lines, beside = [""], at == 20
    for number, word in enumerate(words):
        if len(lines[-1]) + 1 + len(word) > WIDTH - at or (number in breaks and lines[-1]):
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    head = f"{'  --flag STR':<20}{lines[0]}" if beside else f"  --flag STR\n{' ' * 8}{lines[0]}"
    text = "\n".join([head, *(" " * at + line for line in lines[1:])])
    found = refolded(f"{text}\n\n other options\n", WIDTH)
    shown, _, rest = found.partition("\n\n")
    assert rest == " other options\n"
    assert shown.split() == ["--flag", "STR", *words]
    described = shown.split("\n")[0 if beside else 1 :]
    assert all(len(line) <= WIDTH for line in described)
    for line, after in itertools.pairwise(described):
        assert len(line) + 1 + len(after.split()[0]) > WIDTH
